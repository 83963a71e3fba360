"""Reads tokenizer_config.json and special_tokens_map.json without torch or transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plain_files import read_json

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json and, where that has no `added_tokens_decoder`, the tokens of
    special_tokens_map.json over it, as transformers does. A missing file has no entries.

    Raises:
        UnreadableFileError: if a file cannot be read, or is no JSON object.
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
    return read_json(path, dict) if os.path.lexists(path) else {}
