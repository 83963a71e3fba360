"""Finds which licence a package names, and whether it asks for no more than attribution."""

from __future__ import annotations

import importlib.metadata
import re

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


def permissive_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licence that a package names, or None if it is not permissive.

    The first of these fields that says something decides: License-Expression (SPDX, PEP 639), the
    licence classifiers, the first line of the free-text License field. Every licence named must be
    permissive; of an expression that only offers a choice (OR), one.
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
