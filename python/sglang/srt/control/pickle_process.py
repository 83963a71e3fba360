"""The process that reads a trainer's weights: `python -m sglang.srt.control.pickle_process`.

It reads one pickle (`pickle_records.py`, which runs nothing of it), checks its contents, copies
tensors in host memory to a given file, and reports what it has found as plain data.
"""

from __future__ import annotations

import sys

import msgspec

from sglang.srt.control.host_copies import HostCopies
from sglang.srt.control.pickle_records import read_records
from sglang.srt.control.pickled_tensors import WeightsInRecords
from sglang.srt.framed_process import limit_memory, limit_time, read, write
from sglang.srt.sent_tensors import (
    DeviceMemory,
    Memory,
    SentTensors,
    TensorsRefused,
)

MAX_MEMORY_MIB = 1024
MAX_CPU_SECONDS = 60


class ReadPickle(msgspec.Struct, tag=True):
    """The question to this process.

    Attributes:
        is_bucket: the pickle is a flattened bucket; otherwise it has pairs of names and tensors.
        path: a file of this user that the host's memories are copied to.
        max_bytes: limit of their size together.
        key: `multiprocessing`'s authkey, by which processes of one family know each other.
    """

    pickled: bytes
    is_bucket: bool
    path: str
    max_bytes: int
    key: bytes


class Refused(msgspec.Struct, tag=True):
    """The reason why the pickle is not taken, as the rest of a sentence."""

    reason: str


def sent_tensors(request: ReadPickle) -> SentTensors:
    """Reads a pickle and copies its tensors in host memory.

    Raises:
        TensorsRefused: with the reason.
    """
    records, weights = read_records(request.pickled), WeightsInRecords()
    tensors = weights.of_bucket(records) if request.is_bucket else weights.named(records)
    num_bytes = [s.num_bytes for s in weights.sources if not isinstance(s, DeviceMemory)]
    if sum(num_bytes) > request.max_bytes:
        raise TensorsRefused(
            f"its tensors are over more than {request.max_bytes} bytes (--max-weight-bytes)"
        )
    memories: list[Memory] = []
    with open(request.path, "wb") as file:
        copies = HostCopies(file, request.key)
        for source in weights.sources:
            memories.append(source if isinstance(source, DeviceMemory) else copies.copy(source))
    return SentTensors(request.path if num_bytes else "", memories, tensors)


def main() -> None:
    message = read(sys.stdin.buffer)
    if message is None:
        return
    request = msgspec.msgpack.decode(message, type=ReadPickle)
    limit_memory(MAX_MEMORY_MIB, request.max_bytes + (1 << 20))
    limit_time(MAX_CPU_SECONDS)
    answer: SentTensors | Refused
    try:
        answer = sent_tensors(request)
    except TensorsRefused as error:
        answer = Refused(str(error))
    except MemoryError:
        answer = Refused(f"to read it takes more than {MAX_MEMORY_MIB} MiB of memory")
    write(sys.stdout.buffer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
