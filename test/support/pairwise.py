"""Covering sets: few cases of a product in which all pairs of values meet."""

from __future__ import annotations

import itertools
from typing import Any


def all_cases(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The whole product."""
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def pairwise_cases(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Cases in which each two values of different keys meet at least once."""
    everything = all_cases(choices)
    bits: dict[Any, int] = {}  # of each pair one
    pairs_of = []
    for case in everything:
        pairs = itertools.combinations(case.items(), 2)
        pairs_of.append(sum(bits.setdefault(pair, 1 << len(bits)) for pair in pairs))
    missing, cases = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(everything)), key=lambda at: (pairs_of[at] & missing).bit_count())
        missing &= ~pairs_of[best]
        cases.append(everything[best])
    return cases


def name_of(case: dict[str, Any]) -> str:
    return "-".join(getattr(value, "__name__", str(value)) for value in case.values())
