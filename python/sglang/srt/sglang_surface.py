"""Lists what SGLang's clients may send and say: every field, flag and argument, and its neutral
values.

A value is neutral if it asks for nothing that this runtime would have to do: null, false, empty,
SGLang's default, or one of the values below. A field that this runtime does without is accepted at
its neutral values and does nothing; any other value is refused by name. What becomes of flags and
arguments is in `sglang_flags.py`.

Names and defaults are facts, in `sglang_surface.json`; `scripts/read_sglang_surface.py` reads them
from SGLang's sources. What they do not say is here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

ANYTHING = object()  # as a neutral value: every value is neutral
MAX_DEPTH = 4  # of empty lists and objects

# Neutral beside the defaults: rank 0, as there is no other, and what is done anyway.
_MORE_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "generate": {
        "routed_dp_rank": (0,),
        "data_parallel_rank": (0,),
        "disagg_prefill_dp_rank": (0,),
        # Not SGLang's own: its router adds it. There is one model, as in /v1/completions.
        "model": (ANYTHING,),
    },
    "sampling_params": {"beam_width": (1,)},
    "/v1/completions": {
        "routed_dp_rank": (0,),
        "data_parallel_rank": (0,),
        "disagg_prefill_dp_rank": (0,),
        "best_of": (1,),
        "user": (ANYTHING,),
    },
    "/v1/chat/completions": {
        "routed_dp_rank": (0,),
        "data_parallel_rank": (0,),
        "disagg_prefill_dp_rank": (0,),
    },
    "/tokenize": {"model": (ANYTHING,), "add_generation_prompt": (True,)},
    "/detokenize": {"model": (ANYTHING,)},
}


@cache
def facts() -> dict[str, Any]:
    """`version`, `bodies` (fields and defaults) and `flags` (names, number of values, default)."""
    raw = Path(__file__).with_suffix(".json").read_bytes()
    return msgspec.json.decode(raw, type=dict[str, Any])


@cache
def neutral_fields(body: str) -> dict[str, tuple[Any, ...]]:
    """Each field of a body to its neutral values, beside null, false and empty ones.

    Args:
        body: a route such as `/v1/completions`, `generate` or `sampling_params`.
    """
    more = _MORE_VALUES.get(body, {})
    defaults = facts()["bodies"][body]
    return {
        name: (defaults.get(name), *more.get(name, ()))
        for name in dict.fromkeys([*defaults, *more])
    }


def is_neutral(value: Any, neutral: tuple[Any, ...], depth: int = MAX_DEPTH) -> bool:
    """Tells whether a value asks for nothing: null, false, empty, one of `neutral`, or made of
    such."""
    if value is None or value is False or any(_same(value, item) for item in neutral):
        return True
    if depth == 0 or not isinstance(value, str | list | dict):
        return False
    if isinstance(value, str):
        return not value
    inner = value.values() if isinstance(value, dict) else value
    return all(is_neutral(item, neutral, depth - 1) for item in inner)


def _same(value: Any, item: Any) -> bool:
    is_alike = isinstance(value, bool) == isinstance(item, bool)
    return item is ANYTHING or (is_alike and bool(value == item))
