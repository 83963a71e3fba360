"""Tensors that a trainer on this machine sends by naming their memory, as plain data.

A trainer makes these itself (`weight_sync/plain_sending.py`), or a reader of its pickles does
(`control/pickled_tensors.py`); `check_tensors` holds for both. The scheduler opens the memory
(`weight_sync/sent_memory.py`), and looks once more whether each tensor lies within it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

WeightSelector = Literal["target", "draft", "all"]  # the models that sent weights are of
SHARED_MEMORY = Path("/dev/shm")
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
MAX_TENSORS = 65_536
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 40  # of a tensor, in bytes or along one dimension
CUDA_HANDLE_BYTES = 64  # of memory, and of an event: fixed by CUDA
MAX_COUNTERS = 10_000  # in a file of torch's that counts who uses memory of a GPU
MALLOC = b"c"  # second byte of torch's handle of memory: one allocation, by its CUDA handle
NOT_CUDA_MALLOC = (
    "a tensor is in an expandable segment, which is not taken; set"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the trainer"
)

Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
CudaHandle = Annotated[bytes, Meta(min_length=CUDA_HANDLE_BYTES, max_length=CUDA_HANDLE_BYTES)]


class TensorsRefused(ValueError):
    """Tensors that cannot be sent, or bytes that are none; says why as the rest of a sentence."""


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
            knows when no one does.
        counter: which of the file's counters is this memory's.
        event: what to wait for before the memory is read; null: nothing.
    """

    device: Annotated[int, Meta(ge=0, lt=1024)] | Annotated[str, Meta(max_length=64)]
    handle: CudaHandle
    first_byte: Size
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SIZE)]
    counter_file: Annotated[str, Meta(pattern=r"\A/torch_[0-9]+_[0-9]+_[0-9]+\Z", max_length=64)]
    counter: Annotated[int, Meta(ge=0, lt=MAX_COUNTERS)]
    event: CudaHandle | None = None


Memory = HostMemory | DeviceMemory


class SentTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor over a memory.

    Attributes:
        name: empty until it is known.
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
        """Tells whether a memory of that many bytes has all of its values."""
        is_of_a_size = math.prod(self.shape) * DTYPE_BYTES[self.dtype] <= MAX_SIZE
        return is_of_a_size and self.first_byte + self.num_bytes <= num_bytes


class SentTensors(msgspec.Struct, tag=True, frozen=True):
    """Some of the weights, by the memory that they are in.

    Attributes:
        path: the file with every `HostMemory`, which only this user may read.
    """

    path: str
    memories: list[Memory]
    tensors: list[SentTensor]


class SizedMemory(Protocol):
    """A memory, wherever it is."""

    @property
    def num_bytes(self) -> int: ...


def check_tensors(tensors: Sequence[SentTensor], memories: Sequence[SizedMemory]) -> None:
    """Checks what the types of the fields do not say.

    Raises:
        TensorsRefused: unless there are tensors, each with a name, of a known type and within a
            memory.
    """
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise TensorsRefused(f"it has not 1 to {MAX_TENSORS} tensors with names")
    for tensor in tensors:
        if not 0 < len(tensor.name) <= MAX_NAME_CHARS or not tensor.name.isprintable():
            raise TensorsRefused(
                f"it has a tensor whose name is no text of 1 to {MAX_NAME_CHARS} characters"
            )
        if tensor.dtype not in DTYPE_BYTES:
            raise TensorsRefused("it has a tensor of no type")
        if len(tensor.shape) != len(tensor.strides):
            raise TensorsRefused("it has a tensor with other strides than dimensions")
        if tensor.memory >= len(memories):
            raise TensorsRefused("it has a tensor without memory")
        if not tensor.lies_within(memories[tensor.memory].num_bytes):
            raise TensorsRefused("it has a tensor that is not within its memory")


def part_of_bucket(
    flat: SentTensor, name: str, dtype: str, shape: list[int], start: int, end: int
) -> SentTensor:
    """Finds a tensor of a flattened bucket: its metadata count values of the flat tensor.

    Raises:
        TensorsRefused: if the flat tensor has not these values, or is not flat.
    """
    if len(flat.shape) != 1 or flat.strides != [1]:
        raise TensorsRefused("its flattened tensor is not flat")
    unit = DTYPE_BYTES[flat.dtype]
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if not start <= end <= flat.shape[0] or num_bytes != (end - start) * unit:
        raise TensorsRefused("it has metadata that do not fit its flattened tensor")
    return SentTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=contiguous_strides(shape),
        memory=flat.memory,
        first_byte=flat.first_byte + start * unit,
    )


def device_memory(
    device: Any,
    handle: Any,
    num_bytes: Any,
    first_byte: Any,
    counter_file: Any,
    counter: Any,
    event: Any,
    waits: Any,
) -> DeviceMemory:
    """Describes a memory of a GPU by what torch says of it, in torch's order.

    Raises:
        TensorsRefused: if torch does not say this of memory of `cudaMalloc`.
    """
    if not isinstance(handle, bytes) or len(handle) < 2:
        raise TensorsRefused("it has a tensor of a GPU without memory")
    if handle[1:2] != MALLOC:
        raise TensorsRefused(NOT_CUDA_MALLOC)
    fields = {
        "device": device,
        "handle": handle[2:],  # after a version of torch's own
        "first_byte": first_byte,
        "num_bytes": num_bytes,
        "counter_file": counter_file.decode("latin-1") if isinstance(counter_file, bytes) else "",
        "counter": counter,
        "event": event if waits is True else None,
    }
    try:
        return msgspec.convert(fields, DeviceMemory)
    except msgspec.ValidationError:
        raise TensorsRefused(
            "it has a tensor of a GPU whose memory is not described right"
        ) from None


def contiguous_strides(shape: list[int]) -> list[int]:
    """Gives the strides, in values, of a tensor whose values follow each other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
