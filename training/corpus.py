"""The text that the demo models are trained on: the Python source installed on this machine.

That is the standard library and the packages whose metadata names a permissive licence
(`licences.py`). Nothing is downloaded.
Whole packages are held out by a rule that depends on their names alone (`is_held_out`), so two
machines hold out the same packages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from training.licences import permissive_licence

MAX_FILE_BYTES = 200_000
HELD_OUT_MODULUS = 20
HELD_OUT_MAX_BYTES = 3_000_000
HELD_OUT_RULE = (
    f"a package is held out when the first 8 hexadecimal digits of the SHA-256 of its normalised "
    f"distribution name (`stdlib/NAME` for a top-level module or package of the standard library), "
    f"read as a number, are a multiple of {HELD_OUT_MODULUS}, and it brings at most "
    f"{HELD_OUT_MAX_BYTES:,} bytes of source (larger ones are kept for training)"
)

# Code copied in from elsewhere does not carry the licence of the package around it.
VENDOR_DIRS = frozenset(
    {
        "_vendor", "_vendored", "vendor", "vendored", "third_party", "thirdparty", "extern",
    }
)  # fmt: skip
RESTRICTED_NOTICE = re.compile(
    r"GNU (Lesser |Affero |Library )?General Public|\b[AL]?GPL|Mozilla Public|[Pp]roprietary"
)


@dataclass(frozen=True)
class Package:
    """One unit of the corpus: a distribution or a top-level name of the standard library."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class SourceFile:
    """One file: the package it belongs to, a path for messages, and its text."""

    package: Package
    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training files and held-out files; no package is in both."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    dropped: dict[str, int]

    def packages(self, files: Iterable[SourceFile]) -> list[dict[str, str | int]]:
        """Per package of `files`: name, version, licence, number of files, bytes."""
        table: dict[str, dict[str, str | int]] = {}
        for file in files:
            row = table.setdefault(
                file.package.name,
                {
                    "name": file.package.name,
                    "version": file.package.version,
                    "licence": file.package.licence,
                    "files": 0,
                    "bytes": 0,
                },
            )
            row["files"] = int(row["files"]) + 1
            row["bytes"] = int(row["bytes"]) + len(file.text.encode())
        return sorted(table.values(), key=lambda row: str(row["name"]))


def is_held_out(package_name: str) -> bool:
    """Tells whether the name alone puts a package into the held-out set (see HELD_OUT_RULE)."""
    digest = hashlib.sha256(package_name.encode()).hexdigest()
    return int(digest[:8], 16) % HELD_OUT_MODULUS == 0


def source_paths(is_wanted: Callable[[str], bool]) -> Iterator[tuple[Package, Path]]:
    """The files of the standard library, then of the packages with a permissive licence.

    Args:
        is_wanted: takes a package's name; files of others are not looked for.
    """
    yield from _standard_library_paths(is_wanted)
    yield from _installed_paths(is_wanted)


def _standard_library_paths(is_wanted: Callable[[str], bool]) -> Iterator[tuple[Package, Path]]:
    version = ".".join(map(str, sys.version_info[:3]))
    for top in sorted(Path(sysconfig.get_path("stdlib")).iterdir()):
        package = Package("stdlib/" + top.name.removesuffix(".py"), version, "PSF-2.0")
        is_library = top.name not in {"site-packages", "dist-packages", "lib-dynload"}
        if is_library and is_wanted(package.name):
            for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
                if path.suffix == ".py":
                    yield package, path


def _installed_paths(is_wanted: Callable[[str], bool]) -> Iterator[tuple[Package, Path]]:
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        raw_name = dist.metadata["Name"]
        name = re.sub(r"[-_.]+", "-", raw_name or "").lower()  # PEP 503
        if not name or name in seen or not is_wanted(name):
            continue
        licence, files = permissive_licence(dist.metadata), dist.files
        if licence is None or files is None:
            continue
        seen.add(name)
        for entry in sorted(files):
            if entry.suffix == ".py" and ".." not in entry.parts:
                yield Package(name, dist.version, licence), Path(str(dist.locate_file(entry)))


def read_source(path: Path) -> tuple[str | None, str]:
    """The text of a source file, or None and why it is left out: a copy from elsewhere, too long or
    not UTF-8."""
    if not VENDOR_DIRS.isdisjoint(path.parts):
        return None, "vendored"
    if not path.is_file():
        return None, "missing"
    raw = path.read_bytes()
    if len(raw) > MAX_FILE_BYTES:
        return None, "over 200 KB"
    try:
        return raw.decode("utf-8").replace("\r\n", "\n"), ""
    except UnicodeDecodeError:
        return None, "not UTF-8"


def _usable_text(path: Path) -> tuple[str | None, str]:
    """The text of a file to train on, or None and why it is left out."""
    text, reason = read_source(path)
    if text is None:
        return None, reason
    if len(text.strip()) < 64:
        return None, "under 64 characters"
    if RESTRICTED_NOTICE.search(text[:3000]):
        return None, "restricted notice"
    visible = [c for c in text[:20_000] if not c.isspace()]
    letters = sum(c.isalpha() or c == "_" for c in visible)
    if letters < 0.5 * len(visible) or len(text) > 120 * (text.count("\n") + 1):
        return None, "data table"
    return text, ""


def _code_lines(text: str) -> set[str]:
    """The distinct lines of a file that are long enough to recognise a copy by."""
    lines = (line.strip() for line in text.split("\n"))
    return {line for line in lines if len(line) >= 24 and not line.startswith("#")}


def _without_near_copies(
    files: list[SourceFile], held_out: list[SourceFile]
) -> tuple[list[SourceFile], dict[str, int]]:
    """Training files that are neither near copies of held-out files nor of each other.

    A file goes when over half of its longer lines occur in held-out files, or over 70 % of them in
    held-out or earlier training files (families of near-identical files add epochs, not code).
    """
    private: set[str] = set()
    for file in held_out:
        private |= _code_lines(file.text)
    seen = set(private)
    kept: list[SourceFile] = []
    dropped = {"near copy of held-out code": 0, "near copy of training code": 0}
    for file in tqdm(files, desc="near copies", unit="file", mininterval=1.0):
        lines = _code_lines(file.text)
        if len(lines) >= 5 and len(lines & private) > 0.5 * len(lines):
            dropped["near copy of held-out code"] += 1
        elif len(lines) >= 5 and len(lines & seen) > 0.7 * len(lines):
            dropped["near copy of training code"] += 1
        else:
            kept.append(file)
            seen |= lines
    return kept, dropped


def collect_corpus(seed: int, max_bytes: int | None = None) -> Corpus:
    """Reads, filters and splits the installed source; of equal texts one stays.

    Args:
        seed: of the order of the files.
        max_bytes: for quick runs: a random part of the files, of about this size.

    Raises:
        RuntimeError: if there is nothing to train on, or nothing is held out.
    """
    candidates = list(source_paths(lambda name: True))
    random.Random(seed).shuffle(candidates)
    dropped: dict[str, int] = {}
    files: list[SourceFile] = []
    hashes: set[bytes] = set()
    total = 0
    # Held-out packages first: where a text occurs twice, it is the held-out copy that stays.
    candidates.sort(key=lambda item: not is_held_out(item[0].name))
    for package, path in tqdm(candidates, desc="reading", unit="file", mininterval=1.0):
        text, reason = _usable_text(path)
        if text is not None:
            digest = hashlib.sha256(text.encode()).digest()
            reason = "duplicate" if digest in hashes else ""
            hashes.add(digest)
        if reason or text is None:
            dropped[reason] = dropped.get(reason, 0) + 1
            continue
        files.append(SourceFile(package, str(path), text))
        total += len(text)
        if max_bytes is not None and total > max_bytes:
            break
    return _split(files, dropped, seed)


def _split(files: list[SourceFile], dropped: dict[str, int], seed: int) -> Corpus:
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.package.name] = sizes.get(file.package.name, 0) + len(file.text.encode())
    names = {n for n, size in sizes.items() if is_held_out(n) and size <= HELD_OUT_MAX_BYTES}
    held_out = [file for file in files if file.package.name in names]
    train = [file for file in files if file.package.name not in names]
    kept, copies = _without_near_copies(train, held_out)
    dropped.update(copies)
    random.Random(seed).shuffle(kept)
    if not kept or not held_out:
        raise RuntimeError(
            f"The corpus has {len(kept)} training and {len(held_out)} held-out files. Install more "
            "permissively licensed packages, or raise --max-corpus-bytes."
        )
    return Corpus(kept, held_out, dropped)
