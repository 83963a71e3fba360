"""Makes plain data of a trainer's tensors, and tensors of it again; it runs in the trainer.

Values of a CPU are copied, so nothing of them has to live on. Memory of a GPU is named: torch keeps
it until the server has said that it uses it no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch.multiprocessing import reductions

from sglang.srt.plain_tensors import Form, PlainTensors, decode_tensors, encode_tensors
from sglang.srt.sent_tensors import (
    DTYPE_BYTES,
    HostMemory,
    Memory,
    SentTensor,
    TensorsRefused,
    check_tensors,
    contiguous_strides,
    device_memory,
    part_of_bucket,
)
from sglang.srt.weight_sync.sent_memory import DTYPES, contents_of, view_of
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata, LocalSerializedTensor

BUCKET_KEYS = {"flattened_tensor", "metadata"}
ALIGNMENT = 64  # of memories, more than any type needs
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TAKEN = (
    "it is no tensor, no pairs of a name and a tensor, and no dict of the flattened_tensor and the"
    " metadata of a FlattenedTensorBucket; other objects are not sent, so give their tensors names"
)
NOT_PLAIN = (
    "it has an object of type {} where a dense tensor has to be; of a DTensor give its"
    " full_tensor()"
)
SEVERAL_RANKS = "it has tensors for {} ranks, and a server has one"


def serialize_tensors(value: Any) -> bytes:
    """Makes plain data of one tensor, pairs of a name and a tensor, or a flattened bucket.

    Raises:
        TensorsRefused: for anything else, and for tensors neither on the CPU nor on a GPU of CUDA.
    """
    writer = _Writer()
    form: Form = "named"
    if isinstance(value, torch.Tensor):
        form, tensors = "tensor", [writer.tensor("tensor", value)]
    elif isinstance(value, Mapping) and value.keys() == BUCKET_KEYS:
        form, tensors = "bucket", writer.bucket(value["flattened_tensor"], value["metadata"])
    elif isinstance(value, Iterable) and not isinstance(value, Mapping | str | bytes):
        tensors = writer.named(list(value))
    else:
        raise TensorsRefused(TAKEN)
    check_tensors(tensors, writer.memories)
    return encode_tensors(PlainTensors(form, memoryview(writer.host), writer.memories, tensors))


def deserialize_tensors(data: bytes) -> Any:
    """Gives back the tensor, the pairs or the bucket, whose flat tensor is of bytes.

    Raises:
        TensorsRefused: if it is no data of `serialize_tensors`.
        WeightUpdateError: if a GPU's memory cannot be opened, as in the process that has it.
    """
    plain = decode_tensors(data)
    file = torch.frombuffer(bytearray(plain.host) or bytearray(1), dtype=torch.uint8)
    contents = [contents_of(memory, file) for memory in plain.memories]
    if plain.form == "bucket":
        metadata = [_metadata(tensor) for tensor in plain.tensors]
        return {"flattened_tensor": contents[0], "metadata": metadata}
    named = [(tensor.name, view_of(contents[tensor.memory], tensor)) for tensor in plain.tensors]
    return named[0][1] if plain.form == "tensor" else named


class _Writer:
    """Gathers memory. A tensor that comes again has the memory of the first time.

    All methods raise `TensorsRefused`.
    """

    def __init__(self) -> None:
        self.host = bytearray()
        self.memories: list[Memory] = []
        self._places: dict[tuple[Any, ...], int] = {}  # to the index of a memory

    def named(self, pairs: list[Any]) -> list[SentTensor]:
        tensors = []
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TensorsRefused(TAKEN)
            name, value = pair
            if isinstance(value, LocalSerializedTensor):
                tensors.append(self._serialized(name, value))
            else:
                tensors.append(self.tensor(name, value))
        return tensors

    def bucket(self, flat_tensor: Any, metadata: Iterable[Any]) -> list[SentTensor]:
        flat = self.tensor("", flat_tensor)
        return [_part_of(flat, entry) for entry in metadata]

    def tensor(self, name: str, value: Any) -> SentTensor:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or value.layout != torch.strided or value.is_neg():
            raise TensorsRefused(NOT_PLAIN.format(type(value).__name__))
        dtype, tensor = _dtype_name(value.dtype), value.detach()
        if tensor.device.type == "cuda":
            memory, strides = self._on_gpu(tensor), list(tensor.stride())
            first_byte = tensor.storage_offset() * DTYPE_BYTES[dtype]
        elif tensor.device.type == "cpu":
            memory, strides, first_byte = self._copied(tensor), contiguous_strides(tensor.shape), 0
        else:
            raise TensorsRefused(f"it has a tensor on {tensor.device}; send it from the CPU")
        return SentTensor(
            name=name,
            dtype=dtype,
            shape=list(tensor.shape),
            strides=strides,
            memory=memory,
            first_byte=first_byte,
        )

    def _serialized(self, name: str, value: LocalSerializedTensor) -> SentTensor:
        if len(value.values) != 1:
            raise TensorsRefused(SEVERAL_RANKS.format(len(value.values)))
        plain = decode_tensors(value.values[0])
        if plain.form != "tensor":
            raise TensorsRefused("it has something else than one tensor for a rank")
        [tensor] = plain.tensors
        [memory] = plain.memories
        if isinstance(memory, HostMemory):
            memory = self._add_host(plain.host)
        return msgspec.structs.replace(tensor, name=name, memory=self._add(memory))

    def _on_gpu(self, tensor: torch.Tensor) -> int:
        """Adds one memory for all tensors of a storage: the server opens it once."""
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        if key not in self._places:
            arguments: tuple[Any, ...] = reductions.reduce_tensor(tensor)[1]
            uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
            self._places[key] = self._add(device_memory(uuid, *arguments[7:10], *arguments[11:]))
        return self._places[key]

    def _copied(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._places:
            values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            self._places[key] = self._add(self._add_host(values.data))
        return self._places[key]

    def _add_host(self, values: memoryview) -> HostMemory:
        self.host += bytes(-len(self.host) % ALIGNMENT)
        first_byte = len(self.host)
        self.host += values
        return HostMemory(first_byte, len(values))

    def _add(self, memory: Memory) -> int:
        self.memories.append(memory)
        return len(self.memories) - 1


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise TensorsRefused(f"it has values of {dtype}; send one of {', '.join(DTYPE_BYTES)}")
    return NAMES[dtype]


def _part_of(flat: SentTensor, entry: Any) -> SentTensor:
    if not isinstance(entry, FlattenedTensorMetadata):
        raise TensorsRefused("it has metadata that are no FlattenedTensorMetadata of this package")
    dtype, shape = _dtype_name(entry.dtype), list(entry.shape)
    return part_of_bucket(flat, entry.name, dtype, shape, entry.start_idx, entry.end_idx)


def _metadata(tensor: SentTensor) -> FlattenedTensorMetadata:
    start, end = tensor.first_byte, tensor.first_byte + tensor.num_bytes
    shape = torch.Size(tensor.shape)
    return FlattenedTensorMetadata(
        tensor.name, shape, DTYPES[tensor.dtype], start, end, end - start
    )
