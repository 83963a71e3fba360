"""Reads tokenizer_config.json and special_tokens_map.json without torch or transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

MAX_CONFIG_BYTES = 64 * 1024 * 1024  # tokenizer_config.json may list all added tokens
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class UnreadableFileError(ValueError):
    """A file that cannot be used; the message names it."""


def read_text(path: Path, max_bytes: int) -> str:
    """Reads a file of UTF-8 with line ends of any kind.

    Raises:
        UnreadableFileError: if it is missing, too large or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFileError(f"{path} cannot be read ({error})") from None
    if len(raw) > max_bytes:
        raise UnreadableFileError(f"{path} has more than {max_bytes} bytes")
    return text.replace("\r\n", "\n")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json and, where that has no `added_tokens_decoder`, the tokens of
    special_tokens_map.json over it, as transformers does. A missing file has no entries.

    Raises:
        UnreadableFileError: if a file is no JSON object.
    """
    entries = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in entries:
        return entries
    return entries | special_tokens(_read_object(folder / "special_tokens_map.json"))


def special_tokens(entries: dict[str, Any]) -> dict[str, str]:
    """Finds `bos_token` and the others: texts, or objects that hold the text as `content`."""
    found = {}
    for name in (f"{kind}_token" for kind in SPECIAL_TOKENS):
        match entries.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(read_text(path, MAX_CONFIG_BYTES), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableFileError(f"{path} is no JSON object ({error})") from None
