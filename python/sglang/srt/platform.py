"""The only place that asks what hardware there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Platform:
    """What this machine offers.

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
            num_cores=len(os.sched_getaffinity(0)),
            available_host_bytes=_available_host_bytes(),
            device_name=torch.cuda.get_device_name() if has_cuda else "cpu",
            capability=torch.cuda.get_device_capability() if has_cuda else None,
        )


def driver_version() -> str:
    """Of NVIDIA's kernel module; empty without one, or where the system does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.split("\n")[0].strip()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# KiB of shared memory that a block may take, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED_KIB = 99  # of all others from Ampere on


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """What a block may take on a CUDA GPU; for a CPU, the least of all supported GPUs."""
    if device.type != "cuda":
        return LEAST_SHARED_KIB << 10
    capability = torch.cuda.get_device_capability(device)
    return SHARED_KIB.get(capability, LEAST_SHARED_KIB) << 10


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it ends (CUDA, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_warp_group_mma(device: torch.device) -> bool:
    """Whether warp groups multiply matrices from shared memory (CUDA, Hopper alone)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Where an accelerator has no memory left, says for what and how to help.

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
    """Bytes of an accelerator's memory that nobody has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _available_host_bytes() -> int:
    """The smaller of MemAvailable and what the control group leaves."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = _first_numbers(meminfo.read_text()).get("MemAvailable:", available >> 10) << 10
    return min(available, bytes_left(Path("/sys/fs/cgroup"), available))


def bytes_left(group: Path, without_limit: int) -> int:
    """Reads what a control group may still take. Pages of files are counted as its use, and given
    back when others are needed: those of a checkpoint just read may fill it."""
    limit = group / "memory.max"
    if not limit.exists() or not (text := limit.read_text().strip()).isdigit():
        return without_limit
    pages = _first_numbers((group / "memory.stat").read_text())
    of_files = pages.get("inactive_file", 0) + pages.get("active_file", 0)
    return int(text) - int((group / "memory.current").read_text()) + of_files


def _first_numbers(text: str) -> dict[str, int]:
    """The number behind the first word of each line."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines}
