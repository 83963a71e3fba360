"""Prompts of code that the demo models never saw: windows of packages that training holds out.

A package's name decides that (`training/corpus.py`). Which packages are installed depends on the
machine, so a result names those used, with a digest of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training.corpus import HELD_OUT_MAX_BYTES, is_held_out, read_source, source_paths
from training.tokens import BOS_ID


@dataclass(frozen=True)
class Source:
    """A package: its name as training knows it, its version, the texts of its files in order."""

    name: str
    version: str
    texts: list[str]

    @property
    def num_bytes(self) -> int:
        """Returns the size of the source in bytes."""
        return sum(len(text.encode()) for text in self.texts)


def find_held_out() -> list[Source]:
    """The held-out packages of this machine by name: of the standard library and installed, without
    files that training leaves out for what they are."""
    sources: dict[str, Source] = {}
    for package, path in source_paths(is_held_out):
        if (text := read_source(path)[0]) is not None:
            source = sources.setdefault(package.name, Source(package.name, package.version, []))
            source.texts.append(text)
    found = sorted(sources.values(), key=lambda source: source.name)
    return [source for source in found if source.num_bytes <= HELD_OUT_MAX_BYTES]


def draw_windows(
    streams: list[list[int]], num_prompts: int, num_tokens: int, seed: int
) -> list[list[int]]:
    """Prompts of BOS and `num_tokens` - 1 tokens from places drawn over all streams that are long
    enough, each place as likely as any other.

    Raises:
        ValueError: if no stream is long enough.
    """
    width = num_tokens - 1
    places = [(index, len(stream) - width + 1) for index, stream in enumerate(streams)]
    places = [(index, count) for index, count in places if count > 0]
    if not places:
        raise ValueError(f"No source file has {width} tokens.")
    chooser = random.Random(seed)
    indices, counts = zip(*places, strict=True)
    prompts = []
    for index in chooser.choices(indices, counts, k=num_prompts):
        start = chooser.randrange(len(streams[index]) - width + 1)
        prompts.append([BOS_ID, *streams[index][start : start + width]])
    return prompts


def held_out_prompts(
    tokenizer_path: Path, num_prompts: int, num_tokens: int, seed: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts, and what a result says of them."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    packages = find_held_out()
    texts = [text for package in packages for text in package.texts]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    prompts = draw_windows([item.ids for item in encoded], num_prompts, num_tokens, seed)
    return prompts, {
        "packages": {package.name: package.version for package in packages},
        "bytes": sum(package.num_bytes for package in packages),
        "count": len(prompts),
        "sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }
