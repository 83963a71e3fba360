"""Holds what `MultiprocessingSerializer` makes: tensors as plain data, with values or memory.

A magic, which is no beginning of a pickle, and msgpack. Values of a CPU are in it; memory of a GPU
is named, by CUDA IPC.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang.srt.sent_tensors import (
    MAX_TENSORS,
    HostMemory,
    Memory,
    SentTensor,
    TensorsRefused,
    check_tensors,
)

MAGIC = b"SGLTENSORS1\n"  # of 12 bytes, so that base64 of it begins that of the whole
TEXT_MAGIC = base64.b64encode(MAGIC).decode()

Form = Literal["tensor", "named", "bucket"]


class PlainTensors(msgspec.Struct, frozen=True):
    """Tensors, by the memory that they are in.

    Attributes:
        form: what they were: one tensor, whose name means nothing; pairs of a name and a tensor;
            or a flattened bucket, which is the only memory.
        host: every `HostMemory`.
    """

    form: Form
    host: memoryview
    memories: Annotated[list[Memory], Meta(max_length=MAX_TENSORS)]
    tensors: Annotated[list[SentTensor], Meta(max_length=MAX_TENSORS)]


def encode_tensors(tensors: PlainTensors) -> bytes:
    """Makes the bytes that `decode_tensors` takes."""
    return MAGIC + msgspec.msgpack.encode(tensors)


def decode_tensors(data: bytes | memoryview) -> PlainTensors:
    """Reads the tensors of what anyone has sent.

    Args:
        data: is kept, since `host` is a part of it.

    Raises:
        TensorsRefused: if it is something else, or a tensor is not within its memory.
    """
    view = memoryview(data)
    if view[: len(MAGIC)] != MAGIC:
        raise TensorsRefused("it is none of MultiprocessingSerializer of this package")
    try:
        found = msgspec.msgpack.decode(view[len(MAGIC) :], type=PlainTensors)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorsRefused(f"it is damaged: {error}") from None
    hosts = [memory for memory in found.memories if isinstance(memory, HostMemory)]
    if any(memory.first_byte + memory.num_bytes > len(found.host) for memory in hosts):
        raise TensorsRefused("it has memory that is not in it")
    check_tensors(found.tensors, found.memories)
    return found
