"""Corpus and tokenizer of the demo models: installed Python source -> uint16 token stream.

The corpus is whatever permissively licensed Python source the machine has: the standard library
and the installed packages whose metadata names a permissive licence. Nothing is downloaded.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

VOCAB_SIZE = 4096
BOS_TOKEN, EOS_TOKEN, MASK_TOKEN = "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, MASK_TOKEN)
BOS_ID, EOS_ID, MASK_ID = 0, 1, 2

# Pieces that BPE merges within. Line ends and the indentation after them stay apart from each other
# and from the rest, so that a prompt cut before or after a line end or an indentation has the very
# tokens that the model saw there in training. Otherwise: a word with at most one character before
# it, up to three digits, other visible characters, blanks.
PIECE_PATTERN = (
    r"[\r\n]+|(?<=[\r\n])[ \t]+"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|\s+"
)

MAX_FILE_BYTES = 200_000
HELD_OUT_MODULUS = 20
HELD_OUT_MAX_BYTES = 3_000_000
HELD_OUT_RULE = (
    f"a package is held out when the first 8 hexadecimal digits of the SHA-256 of its normalised "
    f"distribution name (`stdlib/NAME` for a top-level module or package of the standard library), "
    f"read as a number, are a multiple of {HELD_OUT_MODULUS}, and it brings at most "
    f"{HELD_OUT_MAX_BYTES:,} bytes of source (larger ones are kept for training)"
)

# SPDX identifiers (https://spdx.org/licenses/) that ask for no more than attribution.
PERMISSIVE_SPDX = frozenset(
    {
        "MIT", "MIT-0", "MIT-CMU", "BSD-1-Clause", "BSD-2-Clause", "BSD-3-Clause", "0BSD",
        "Apache-2.0", "ISC", "PSF-2.0", "Python-2.0", "Python-2.0.1", "CNRI-Python", "Zlib",
        "Unlicense", "BSL-1.0", "CC0-1.0", "HPND", "NCSA",
    }
)  # fmt: skip
PERMISSIVE_CLASSIFIERS = frozenset(
    {
        "MIT License",
        "MIT No Attribution License (MIT-0)",
        "BSD License",
        "Zero-Clause BSD (0BSD)",
        "Apache Software License",
        "ISC License (ISCL)",
        "Python Software Foundation License",
        "zlib/libpng License",
        "The Unlicense (Unlicense)",
        "Boost Software License 1.0 (BSL-1.0)",
        "CMU License (MIT-CMU)",
        "Historical Permission Notice and Disclaimer (HPND)",
    }
)
UNINFORMATIVE_CLASSIFIERS = frozenset({"OSI Approved", "DFSG approved"})
LICENCE_NAMES = frozenset(
    {
        "mit", "bsd", "apache", "isc", "psf", "zlib", "unlicense", "0bsd", "hpnd",
    }
)  # fmt: skip
LICENCE_FILLER = frozenset(
    {
        "the", "license", "licence", "licenses", "software", "foundation", "python", "version",
        "v2", "v2.0", "2.0", "2", "3", "clause", "new", "modified", "revised", "simplified",
        "style", "and", "or", "asl",
    }
)  # fmt: skip
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


def permissive_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licence a package names, when it is permissive, else None.

    Read in this order, the first field that says something decides: License-Expression (SPDX,
    PEP 639), the licence classifiers, the free-text License field (its first line). Every licence
    named must be permissive, except in an expression that only offers a choice (OR).
    """
    fields = metadata.json
    expression = str(fields.get("license_expression", ""))
    if expression:
        bare = re.sub(r"\s+WITH\s+[\w.-]+", "", expression)
        named = [p for p in re.split(r"[()\s]+", bare) if p not in {"", "AND", "OR"}]
        known = [identifier in PERMISSIVE_SPDX for identifier in named]
        enough = any(known) if " AND " not in bare else all(known)
        return expression if known and enough else None
    listed = fields.get("classifier", [])
    classifiers = [c.split(" :: ")[-1] for c in listed if str(c).startswith("License ::")]
    classifiers = [c for c in classifiers if c not in UNINFORMATIVE_CLASSIFIERS]
    if classifiers:
        return ", ".join(classifiers) if PERMISSIVE_CLASSIFIERS.issuperset(classifiers) else None
    text = str(fields.get("license", "")).strip()
    first_line = text.splitlines()[0].strip() if text else ""
    words = set(re.findall(r"[a-z0-9.]+", first_line.lower()))
    plain = bool(words & LICENCE_NAMES) and words <= LICENCE_NAMES | LICENCE_FILLER
    return first_line if plain else None


def is_held_out(package_name: str) -> bool:
    """Whether the name alone puts a package into the held-out set (see HELD_OUT_RULE)."""
    digest = hashlib.sha256(package_name.encode()).hexdigest()
    return int(digest[:8], 16) % HELD_OUT_MODULUS == 0


def _standard_library_paths() -> Iterator[tuple[Package, Path]]:
    version = ".".join(map(str, sys.version_info[:3]))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in {"site-packages", "dist-packages", "lib-dynload"}:
            name = "stdlib/" + relative.parts[0].removesuffix(".py")
            yield Package(name, version, "PSF-2.0"), path


def _installed_paths() -> Iterator[tuple[Package, Path]]:
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        raw_name = dist.metadata["Name"]
        if not raw_name or dist.files is None:
            continue
        name = re.sub(r"[-_.]+", "-", raw_name).lower()  # PEP 503
        licence = permissive_licence(dist.metadata)
        if name in seen or licence is None:
            continue
        seen.add(name)
        for entry in sorted(dist.files):
            if entry.suffix == ".py" and ".." not in entry.parts:
                yield Package(name, dist.version, licence), Path(str(dist.locate_file(entry)))


def _usable_text(path: Path) -> tuple[str | None, str]:
    """The text of a source file, or None and the reason to leave it out."""
    if not VENDOR_DIRS.isdisjoint(PurePath(path).parts):
        return None, "vendored"
    if not path.is_file():
        return None, "missing"
    raw = path.read_bytes()
    if len(raw) > MAX_FILE_BYTES:
        return None, "over 200 KB"
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None, "not UTF-8"
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
    """Read, filter, de-duplicate (SHA-256 of the text) and split the installed source.

    `max_bytes` keeps a random share of the files of about that size (for quick runs). Files come
    back in an order shuffled by `seed`.
    """
    candidates = list(_standard_library_paths()) + list(_installed_paths())
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


def train_tokenizer(files: list[SourceFile], max_bytes: int) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries (Sennrich et al. 2016; bytes as in GPT-2, 2019).

    Trained on the first `max_bytes` of the (shuffled) files. Ids 0, 1, 2 are BOS, EOS and mask;
    the post-processor puts one BOS before an encoded text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    budget, texts = max_bytes, []
    for file in files:
        if budget <= 0:
            break
        texts.append(file.text)
        budget -= len(file.text)
    tokenizer.train_from_iterator(tqdm(texts, desc="BPE", unit="file", mininterval=1.0), trainer)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if tokenizer.get_vocab_size() != VOCAB_SIZE or ids != [BOS_ID, EOS_ID, MASK_ID]:
        raise RuntimeError(
            f"BPE training gave {tokenizer.get_vocab_size()} entries and special ids {ids}; "
            f"{VOCAB_SIZE} entries are needed. Train on more text (--bpe-bytes)."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN}:1 $B:1",
        special_tokens=[(BOS_TOKEN, BOS_ID)],
    )
    return tokenizer


def pack(tokenizer: Tokenizer, files: list[SourceFile], label: str | None = None) -> np.ndarray:
    """One token stream, BOS text EOS per file. Returns [num_tokens] uint16.

    Special-token names inside a file are encoded as ordinary text. `label` shows a progress bar.
    """
    tokenizer.encode_special_tokens = True
    parts: list[np.ndarray] = []
    group = 256
    starts = range(0, len(files), group)
    for start in tqdm(starts, desc=label, unit="group", mininterval=1.0, disable=label is None):
        texts = [file.text for file in files[start : start + group]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            parts.append(np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16))
    tokenizer.encode_special_tokens = False
    return np.concatenate(parts)
