"""Reads files that a model's folder holds or a flag names: regular ones, up to a size, at once.

Anything else is refused when it is opened: a pipe would block, and a device never end.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

MAX_JSON_BYTES = 64 * 1024 * 1024  # tokenizer_config.json may list all added tokens
MAX_DEPTH = 64  # of objects and lists in JSON, one in the other
NOT_REGULAR = "it is no regular file"
KINDS = {dict: "an object", list: "a list"}

Kind = TypeVar("Kind", dict[str, Any], list[Any])


class UnreadableFileError(ValueError):
    """A file that cannot be used; the message names it.

    Attributes:
        reason: the message without the name.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading, without waiting for the other end of a pipe.

    Raises:
        OSError: if it cannot be opened, or is no regular file.
        ValueError, TypeError: if that is no name of a file.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(NOT_REGULAR)
    return file


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Reads a whole file.

    Raises:
        UnreadableFileError: if it is missing, no regular file or too large.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UnreadableFileError(path, f"cannot be read: {reason or error}") from None
    if len(raw) > max_bytes:
        reason = f"is larger than {max_bytes} bytes, the most that is read of it"
        raise UnreadableFileError(path, reason)
    return raw


def read_text(path: Path, max_bytes: int) -> str:
    """Reads a file of UTF-8 with line ends of any kind.

    Raises:
        UnreadableFileError: as `read_bytes`, and if it is no UTF-8.
    """
    try:
        return read_bytes(path, max_bytes).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(path, f"is no text in UTF-8: {error}") from None


def read_json(path: Path, kind: type[Kind], max_bytes: int = MAX_JSON_BYTES) -> Kind:
    """Reads a file of JSON, in which numbers may be NaN and infinite, as transformers has it.

    Args:
        kind: `dict` or `list`, what the file must hold.

    Raises:
        UnreadableFileError: as `read_text`, and if it holds something else.
    """
    text = read_text(path, max_bytes)
    try:
        value = json.loads(text)
        _check_parts(value)
    except RecursionError:
        raise UnreadableFileError(path, "is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UnreadableFileError(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise UnreadableFileError(path, f"must hold JSON with {KINDS[kind]}")
    return value


def check_folder(folder: Path) -> None:
    """Looks at what a library is going to open on its own.

    Raises:
        UnreadableFileError: if something in the folder is neither a regular file nor a folder.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UnreadableFileError(path, f"cannot be read: {NOT_REGULAR}")


def _check_parts(value: Any) -> None:
    """
    Raises:
        RecursionError: for more than `MAX_DEPTH` objects and lists, one in the other. What a parser
            allows depends on the version of Python.
        ValueError: for halves of characters, which cannot be handed on.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for each in level for part in _parts(each)]
    if level:
        raise RecursionError


def _parts(value: Any) -> Iterator[Any]:
    match value:
        case str():
            value.encode()
        case dict():
            yield from value
            yield from value.values()
        case list():
            yield from value


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
