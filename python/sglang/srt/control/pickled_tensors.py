"""Finds the tensors in the records of a pickle, and checks every argument of every record.

Memory is only described here: `host_copies.py` copies that of the host, and the process that holds
the GPU opens that of a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.control.pickle_records import Made, Name, read_records
from sglang.srt.sent_tensors import (
    DTYPE_BYTES,
    MAX_DIMENSIONS,
    MAX_SIZE,
    DeviceMemory,
    SentTensor,
    TensorsRefused,
    check_tensors,
    device_memory,
    part_of_bucket,
)

SHARED_FILE = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,10}_[0-9]{1,10}")
SOCKET_PATH = re.compile(r"/[ -~]{1,106}")
NUM_CUDA_ARGUMENTS = 15  # of torch's function for a tensor on a GPU
NO_TENSOR = "it has something else where a tensor has to be"


@dataclass(frozen=True, eq=False, slots=True)
class SharedFile:
    """A file in shared memory, by its name (`file_system` of torch's sharing strategies)."""

    name: str
    num_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class HandedFile:
    """A file that its owner hands over through a socket (`file_descriptor`)."""

    socket: str
    ticket: int
    num_bytes: int


HostSource = SharedFile | HandedFile
Source = HostSource | DeviceMemory


class WeightsInRecords:
    """Finds the tensors in the records of `read_records`, and the places of their memory.

    Raises:
        TensorsRefused: by every method, for anything that trainers do not send.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        # A storage that occurs again is the same one: its owner has counted it once.
        self._storages: dict[Made, int] = {}  # to the index of its source
        self._tensors: dict[Made, SentTensor] = {}

    def named(self, pairs: Any) -> list[SentTensor]:
        """Finds the tensors of pairs of a name and a tensor."""
        if not isinstance(pairs, list | tuple):
            raise TensorsRefused("it has no list of pairs of a name and a tensor")
        tensors = []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise TensorsRefused("it has an entry that is no pair of a name and a tensor")
            tensor = self._tensor(pair[1])
            tensors.append(msgspec.structs.replace(tensor, name=_text(pair[0])))
        check_tensors(tensors, self.sources)
        return tensors

    def of_bucket(self, bucket: Any) -> list[SentTensor]:
        """Finds the tensors of a flattened bucket."""
        if not isinstance(bucket, dict) or bucket.keys() != {"flattened_tensor", "metadata"}:
            raise TensorsRefused("it has no flattened_tensor with metadata")
        flat, entries = self._tensor(bucket["flattened_tensor"]), bucket["metadata"]
        if not isinstance(entries, list | tuple):
            raise TensorsRefused("it has no list of metadata")
        tensors = [_part_of(flat, entry) for entry in entries]
        check_tensors(tensors, self.sources)
        return tensors

    def _tensor(self, record: Any) -> SentTensor:
        """Finds a tensor, without a name."""
        if not isinstance(record, Made):
            raise TensorsRefused(NO_TENSOR)
        if record not in self._tensors:
            self._tensors[record] = self._new_tensor(record)
        return self._tensors[record]

    def _new_tensor(self, record: Made) -> SentTensor:
        match record:
            case Made("rebuild_tensor", (Name(), storage, (first, shape, strides, bool()))):
                return self._over_storage(storage, first, shape, strides)
            case Made("rebuild_cuda_tensor" | "_rebuild_cuda_tensor_modified", arguments):
                return self._on_a_gpu(arguments)
            case Made("LocalSerializedTensor", (), {"values": [bytes() as pickled]}):
                return self._tensor(_only_a_tensor(read_records(pickled)))
            case Made("LocalSerializedTensor"):
                raise TensorsRefused("it has tensors for several ranks, and this server has one")
        raise TensorsRefused(NO_TENSOR)

    def _over_storage(self, storage: Any, first: Any, shape: Any, strides: Any) -> SentTensor:
        match storage:
            case Made("rebuild_typed_storage", (Made() as memory, Name(dtype))):
                if memory not in self._storages:
                    self._storages[memory] = self._add(_host_source(memory))
                return self._view(self._storages[memory], dtype, first, shape, strides)
        raise TensorsRefused("it has a storage of a kind that is not taken")

    def _on_a_gpu(self, arguments: tuple[Any, ...]) -> SentTensor:
        is_right = len(arguments) == NUM_CUDA_ARGUMENTS and isinstance(arguments[10], bool)
        match arguments[:6]:
            case (Name(), shape, strides, first, Name(), Name(dtype)) if is_right:
                index = self._add(device_memory(*arguments[6:10], *arguments[11:]))
                return self._view(index, dtype, first, shape, strides)
        raise TensorsRefused("it has a tensor of a GPU with other arguments than torch gives")

    def _add(self, source: Source) -> int:
        self.sources.append(source)
        return len(self.sources) - 1

    def _view(self, memory: int, dtype: str, first: Any, shape: Any, strides: Any) -> SentTensor:
        if dtype not in DTYPE_BYTES:
            raise TensorsRefused("it has a tensor of no type")
        return SentTensor(
            name="",
            dtype=dtype,
            shape=_numbers(shape),
            strides=_numbers(strides),
            memory=memory,
            first_byte=_number(first) * DTYPE_BYTES[dtype],
        )


def _part_of(flat: SentTensor, entry: Any) -> SentTensor:
    """Finds a tensor of a bucket; its metadata count in values of the flat tensor."""
    match entry:
        case Made(
            "FlattenedTensorMetadata",
            (),
            {"name": name, "shape": shape, "dtype": Name(dtype), "start_idx": a, "end_idx": b},
        ) if dtype in DTYPE_BYTES:
            return part_of_bucket(
                flat, _text(name), dtype, _numbers(shape), start=_number(a), end=_number(b)
            )
    raise TensorsRefused("it has metadata of another kind")


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TensorsRefused("it has a tensor whose name is no text")
    return name


def _only_a_tensor(record: Any) -> Any:
    """Refuses a pickle within a pickle that contains a further one."""
    if isinstance(record, Made) and record.kind == "LocalSerializedTensor":
        raise TensorsRefused("it has pickles in pickles in pickles")
    return record


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise TensorsRefused(f"it has something else where a number from 0 to {MAX_SIZE} has to be")
    return value


def _numbers(value: Any) -> list[int]:
    """Reads a shape, or strides."""
    match value:
        case Made("Size", (tuple() as sizes,)) | (tuple() as sizes) if len(sizes) <= MAX_DIMENSIONS:
            return [_number(size) for size in sizes]
    raise TensorsRefused(f"it has a shape that is none of up to {MAX_DIMENSIONS} sizes")


def _host_source(record: Made) -> HostSource:
    match record:
        case Made("rebuild_storage_filename", (Name(), bytes(), bytes() as name, size)):
            if not SHARED_FILE.fullmatch(name):
                raise TensorsRefused("it names a file that is none of torch's in shared memory")
            return SharedFile(name.decode()[1:], _size(size))
        case Made("rebuild_storage_fd", (Name(), Made("DupFd", (), {"_id": place}), size)):
            match place:
                case (str() as path, int() as ticket) if SOCKET_PATH.fullmatch(path):
                    return HandedFile(path, _number(ticket), _size(size))
    raise TensorsRefused("it has memory of a kind that is not taken")


def _size(value: Any) -> int:
    """Reads the number of bytes of a memory."""
    if not _number(value):
        raise TensorsRefused("it has a tensor without memory")
    return _number(value)
