"""Prompts of code that the demo models never saw: windows of packages held out by their name.

The rule is that of training (`scripts/demo_models/data.py`). Which packages there are depends on
the machine, so a result names them, with a digest of the prompts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "demo_models"))

from data import (
    BOS_ID,
    HELD_OUT_MAX_BYTES,
    MAX_FILE_BYTES,
    VENDOR_DIRS,
    is_held_out,
    permissive_licence,
)


@dataclass(frozen=True)
class Source:
    """A package: its name as training knows it, its version, the texts of its files in order."""

    name: str
    version: str
    texts: list[str]

    @property
    def num_bytes(self) -> int:
        """Of source."""
        return sum(len(text.encode()) for text in self.texts)


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from.

    Attributes:
        packages: sorted by name.
        note: what a reader of the result must know; empty if there is nothing.
    """

    packages: list[Source]
    note: str

    def describe(self, prompts: list[list[int]]) -> dict[str, Any]:
        """The part of a result that says what was asked."""
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        return {
            "packages": {package.name: package.version for package in self.packages},
            "bytes": sum(package.num_bytes for package in self.packages),
            "count": len(prompts),
            "sha256": digest,
            "note": self.note,
        }


def find_held_out() -> PromptSource:
    """The held-out packages of this machine: of the standard library and installed."""
    found = [
        source
        for source in (*_standard_library(is_held_out), *_installed(is_held_out))
        if source.texts and source.num_bytes <= HELD_OUT_MAX_BYTES
    ]
    if found:
        return PromptSource(sorted(found, key=lambda source: source.name), "")
    everything = [source for source in _standard_library(lambda name: True) if source.texts]
    note = "no held-out package here: prompts are of the whole standard library, trained on"
    return PromptSource(everything, note)


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
    source = find_held_out()
    texts = [text for package in source.packages for text in package.texts]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    prompts = draw_windows([item.ids for item in encoded], num_prompts, num_tokens, seed)
    return prompts, source.describe(prompts)


def _standard_library(is_wanted: Callable[[str], bool]) -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.iterdir()):
        name = "stdlib/" + path.name.removesuffix(".py")
        is_source = path.suffix == ".py" or (path.is_dir() and "-packages" not in path.name)
        if is_source and path.name not in ("lib-dynload", "__pycache__") and is_wanted(name):
            files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
            yield Source(name, platform.python_version(), _texts(files))


def _installed(is_wanted: Callable[[str], bool]) -> Iterator[Source]:
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()  # PEP 503
        files = distribution.files
        if not name or name in seen or files is None or not is_wanted(name):
            continue
        if permissive_licence(distribution.metadata) is None:
            continue
        seen.add(name)
        paths = [
            Path(str(distribution.locate_file(file)))
            for file in sorted(files)
            if file.suffix == ".py" and ".." not in file.parts
        ]
        yield Source(name, distribution.version, _texts(paths))


def _texts(paths: list[Path]) -> list[str]:
    """Of the files that are no copies from elsewhere, not huge and in UTF-8."""
    texts = []
    for path in paths:
        if not VENDOR_DIRS.isdisjoint(path.parts) or not path.is_file():
            continue
        raw = path.read_bytes()
        if len(raw) > MAX_FILE_BYTES:
            continue
        try:
            texts.append(raw.decode("utf-8").replace("\r\n", "\n"))
        except UnicodeDecodeError:
            continue
    return texts
