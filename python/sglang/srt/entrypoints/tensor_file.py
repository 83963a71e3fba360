"""Tensors of this process as a safetensors file that the scheduler reads, in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sglang.srt.managers.body_parsing import field_error
from sglang.srt.managers.control_messages import FromFile

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
SHARED_MEMORY = Path("/dev/shm")
HEADER_BYTES_PER_TENSOR = 1024  # name, type, shape and offsets, generously


@contextmanager
def written_tensors(named_tensors: NamedTensors, fallback: Path) -> Iterator[FromFile]:
    """A file with the tensors, only for this user, that is gone after the block.

    Args:
        fallback: the directory to write to where shared memory is missing or too small.

    Raises:
        RequestError: if a name or a tensor is none, or a name comes twice.
        OSError: if the file cannot be written.
    """
    from safetensors.torch import save_file

    tensors = _collect(named_tensors)
    num_bytes = sum(
        tensor.numel() * tensor.element_size() + HEADER_BYTES_PER_TENSOR
        for tensor in tensors.values()
    )
    directory = _directory_for(num_bytes, fallback)
    descriptor, name = tempfile.mkstemp(prefix="sglang-weights-", dir=directory)  # mode 0600
    os.close(descriptor)
    path = Path(name)
    try:
        save_file(tensors, path)
        path.chmod(0o600)
        yield FromFile(name, delete=True)
    finally:
        path.unlink(missing_ok=True)


def _collect(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """Tensors on the CPU by name, each with memory of its own, as safetensors wants them."""
    import torch

    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    tensors: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, tensor in pairs:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise field_error("named_tensors", "must be pairs of a name and a tensor")
        if name in tensors:
            raise field_error("named_tensors", "must not name a tensor twice")
        copy = tensor.detach().to("cpu").contiguous()
        address = copy.untyped_storage().data_ptr()
        tensors[name] = copy.clone() if address in memory else copy
        memory.add(address)
    if not tensors:
        raise field_error("named_tensors", "must have at least one tensor")
    return tensors


def _directory_for(num_bytes: int, fallback: Path) -> Path:
    is_usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    if is_usable and shutil.disk_usage(SHARED_MEMORY).free > num_bytes:
        return SHARED_MEMORY
    return fallback
