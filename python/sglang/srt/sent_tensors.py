"""Tensors that a trainer on this machine sends by naming their memory, as plain data.

A reader of the trainer's bytes makes these (`control/pickled_tensors.py`), and the scheduler opens
the memory (`weight_sync/sent_memory.py`). Both check that each tensor lies within it.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

# Names of torch's types, with the bytes of a value.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 40  # of a tensor, in bytes or along one dimension
CUDA_HANDLE_BYTES = 64  # of memory, and of an event: fixed by CUDA
MAX_COUNTERS = 10_000  # in a file of torch's that counts who uses memory of a GPU

Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
CudaHandle = Annotated[bytes, Meta(min_length=CUDA_HANDLE_BYTES, max_length=CUDA_HANDLE_BYTES)]


class HostMemory(msgspec.Struct, tag=True, frozen=True):
    """Bytes of the file that the tensors come with."""

    first_byte: Size
    num_bytes: Size


class DeviceMemory(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A part of what another process has allocated on a GPU, by CUDA IPC.

    Attributes:
        device: the GPU's index, or its UUID.
        handle: of the whole allocation.
        counter_file: in shared memory; there torch counts who uses the memory, so that its owner
            knows when nobody does.
        counter: which of the file's counters is this memory's.
        event: what to wait for before the memory is read; null: nothing.
    """

    device: Annotated[int, Meta(ge=0, lt=1024)] | Annotated[str, Meta(max_length=64)]
    handle: CudaHandle
    first_byte: Size
    num_bytes: Size
    counter_file: Annotated[str, Meta(pattern=r"^/torch_\d+_\d+_\d+$", max_length=64)]
    counter: Annotated[int, Meta(ge=0, lt=MAX_COUNTERS)]
    event: CudaHandle | None = None


Memory = HostMemory | DeviceMemory


class SentTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor over a memory.

    Attributes:
        dtype: one of `DTYPE_BYTES`.
        strides: between values along each dimension, in values.
        memory: index of the memory.
        first_byte: where in the memory its first value is.
    """

    name: str
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=MAX_DIMENSIONS)]
    strides: list[Size]
    memory: Size
    first_byte: Size

    @property
    def num_bytes(self) -> int:
        """Counts from the first value to the end of the last one."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * DTYPE_BYTES[self.dtype]

    def lies_within(self, num_bytes: int) -> bool:
        """Tells whether a memory of so many bytes has all of its values."""
        is_of_a_size = math.prod(self.shape) * DTYPE_BYTES[self.dtype] <= MAX_SIZE
        return is_of_a_size and self.first_byte + self.num_bytes <= num_bytes


class SentTensors(msgspec.Struct, tag=True, frozen=True):
    """Some of the weights, by the memory that they are in.

    Attributes:
        path: the file with every `HostMemory`, which only this user may read.
        tensors: those of one memory follow each other.
    """

    path: str
    memories: list[Memory]
    tensors: list[SentTensor]


def contiguous_strides(shape: list[int]) -> list[int]:
    """The strides, in values, of a tensor whose values follow each other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
