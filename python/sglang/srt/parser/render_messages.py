"""What crosses between the front end and the process that renders chat templates."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

NUM_LENGTH_BYTES = 8


class RenderSetup(msgspec.Struct, kw_only=True):
    """The first message: the templates by name, and what a chat may take."""

    templates: dict[str, str]
    max_chars: int
    max_seconds: int
    max_memory_mib: int


class RenderRequest(msgspec.Struct, kw_only=True):
    """A chat for the template of this name."""

    template: str
    variables: dict[str, Any]
    continue_final_message: bool = False


class RenderReply(msgspec.Struct, kw_only=True):
    """The prompt, or why there is none."""

    text: str | None = None
    error: str | None = None


def write(stream: BinaryIO, message: bytes) -> None:
    """Writes a message behind its length."""
    stream.write(len(message).to_bytes(NUM_LENGTH_BYTES, "little") + message)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream, or in the middle of a message."""
    head = stream.read(NUM_LENGTH_BYTES)
    if len(head) < NUM_LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    message = stream.read(length)
    return message if len(message) == length else None
