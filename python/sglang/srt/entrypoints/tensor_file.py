"""Weights in a private file that the scheduler reads, in shared memory where that has room."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sglang.srt.frontend.errors import RequestError, ServiceError, field_error
from sglang.srt.messages.control import FromFile
from sglang.srt.sent_tensors import SHARED_MEMORY

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
HEADER_BYTES_PER_TENSOR = 1024  # name, type, shape and offsets, generously
WRITE_BYTES = 4 << 20  # so much of a body is written at a time, beside the event loop


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
    with private_file(num_bytes, fallback) as path:
        save_file(tensors, path)
        path.chmod(0o600)
        yield FromFile(str(path), delete=True)


@asynccontextmanager
async def received_weights(
    parts: AsyncIterator[bytes], num_bytes: int, fallback: Path
) -> AsyncIterator[FromFile]:
    """A file with the bytes that a client sends, only for this user, that is gone after the block.

    Args:
        parts: the bytes as they arrive; what it raises ends the file too.
        num_bytes: how many there are at most.
        fallback: the directory to write to where shared memory is missing or too small.

    Raises:
        RequestError: if there are no bytes.
        ServiceError: with status 503 if they cannot be stored.
    """
    with ExitStack() as stack:
        try:
            path = stack.enter_context(private_file(num_bytes, fallback))
            written = await _write_parts(parts, path)
        except OSError as error:
            raise ServiceError(f"The weights cannot be stored: {error.strerror}.", 503) from error
        if not written:
            raise RequestError(None, "There are no bytes; send those of a safetensors file.")
        yield FromFile(str(path), delete=True)


async def _write_parts(parts: AsyncIterator[bytes], path: Path) -> int:
    """Writes what arrives in threads, a few MiB at a time; returns the number of bytes."""
    num_bytes, waiting = 0, bytearray()
    with path.open("wb") as file:
        async for part in parts:
            waiting += part
            if len(waiting) >= WRITE_BYTES:
                num_bytes += await asyncio.to_thread(file.write, waiting)
                waiting = bytearray()
        return num_bytes + await asyncio.to_thread(file.write, waiting)


@contextmanager
def private_file(num_bytes: int, fallback: Path) -> Iterator[Path]:
    """An empty file, only for this user, that is gone after the block."""
    directory = _directory_for(num_bytes, fallback)
    descriptor, name = tempfile.mkstemp(prefix="sglang-weights-", dir=directory)  # mode 0600
    os.close(descriptor)
    path = Path(name)
    try:
        yield path
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
