"""Reads a token map: the only tokens of a target that a draft head drafts; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from sglang.srt.plain_files import UnreadableFileError, read_bytes, read_json

TOKEN_MAP = "--speculative-token-map"
MAX_TOKEN_MAP_BYTES = 1 << 26


def read_token_map(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The target ids of a head's own tokens: a list in JSON, or a safetensors file that holds one
    tensor of integers.

    Raises:
        ValueError: for a file that holds something else; the text names the flag and the remedy.
    """
    ids: Any = None
    if path.suffix == ".json" or path.suffix == ".safetensors":
        try:
            if path.suffix == ".json":
                ids = read_json(path, list, MAX_TOKEN_MAP_BYTES)
            else:
                ids = _ids_of_safetensors(read_bytes(path, MAX_TOKEN_MAP_BYTES))
        except UnreadableFileError as error:
            raise ValueError(f"{TOKEN_MAP} {error}.") from None
        except (ValueError, TypeError, SafetensorError) as error:
            raise ValueError(f"{TOKEN_MAP} {path} cannot be read: {error}.") from None
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            f"{TOKEN_MAP} {path} is no list of token ids; give a .json file with a list, or a"
            " .safetensors file with one tensor of integers."
        )
    wrong = [each for each in ids if type(each) is not int or not 0 <= each < vocab_size]
    if wrong:
        raise ValueError(
            f"{TOKEN_MAP} {path} has {wrong[0]!r}, but token ids are integers below the target's"
            f" vocab_size {vocab_size}; use the map that belongs to this target."
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{TOKEN_MAP} {path} has a token id twice; name each once.")
    return tuple(ids)


def _ids_of_safetensors(raw: bytes) -> Any:
    try:
        values = [*safetensors.numpy.load(raw).values()]
    except KeyError:  # a type that numpy does not have
        return None
    if len(values) != 1 or values[0].ndim != 1 or values[0].dtype.kind not in "iu":
        return None
    return values[0].tolist()
