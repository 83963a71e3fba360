"""Asks torch about the hardware; `host.py` is without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from sglang.srt.host import available_bytes, num_cores


@dataclass(frozen=True)
class Platform:
    """The resources that this machine offers.

    Attributes:
        device: `cuda` or `cpu`, the better of those that work.
        num_cores: processor cores that this process may use.
        available_host_bytes: host memory that can be taken without swapping.
        device_name: name of the accelerator, or of the processor.
        capability: compute capability of a CUDA GPU; None without one.
    """

    device: str
    num_cores: int
    available_host_bytes: int
    device_name: str
    capability: tuple[int, int] | None = None

    @classmethod
    def probe(cls) -> Platform:
        """Looks at the machine, once per process."""
        has_cuda = torch.cuda.is_available()
        return cls(
            device="cuda" if has_cuda else "cpu",
            num_cores=num_cores(),
            available_host_bytes=available_bytes(),
            device_name=torch.cuda.get_device_name() if has_cuda else "cpu",
            capability=torch.cuda.get_device_capability() if has_cuda else None,
        )


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# KiB of shared memory that a block may take, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED_KIB = 99  # of all others from Ampere on


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Returns the shared memory that a block may take on a CUDA GPU; for a CPU, the least of all
    supported GPUs."""
    if device.type != "cuda":
        return LEAST_SHARED_KIB << 10
    capability = torch.cuda.get_device_capability(device)
    return SHARED_KIB.get(capability, LEAST_SHARED_KIB) << 10


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Tells whether a kernel can be launched while the one before it ends (CUDA, Hopper and
    later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_warp_group_mma(device: torch.device) -> bool:
    """Tells whether warp groups multiply matrices from shared memory (CUDA, Hopper alone)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turns an accelerator's lack of memory into an error that says for what, and how to help.

    Raises:
        MemoryError: instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise MemoryError(
            f"The GPU has too little memory for {what}: {free >> 20} of {total >> 20} MiB are free."
            f" {remedy} `nvidia-smi` shows who else uses it."
        ) from error


def static_bytes_left(device: str, share: float) -> int:
    """Bytes: `share` of an accelerator's memory less all that is in use now."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - (total - free)


def free_bytes(device: str) -> int:
    """Returns how many bytes of an accelerator's memory are free."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
