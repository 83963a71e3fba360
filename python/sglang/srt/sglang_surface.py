"""What SGLang's clients may send and say: every field, flag and argument, and its neutral values.

A value is neutral if it asks for nothing that this runtime would have to do: null, false, empty,
SGLang's default, or one of the values below. What this runtime does without is accepted at its
neutral values and does nothing; any other value is refused by name.

Names and defaults are facts, in `sglang_surface.json`; `scripts/read_sglang_surface.py` reads them
from SGLang's sources. What they do not say is here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
_MORE_OF_FLAGS: dict[str, tuple[Any, ...]] = {
    "--trust-remote-code": (True,),  # no model here has code
    "--enable-metrics": (True,),  # /metrics is always there
    "--enable-cache-report": (True,),  # `cached_tokens` too
    "--enable-mixed-chunk": (True,),  # prompts and decode rows share steps
    "--enable-memory-saver": (True,),  # memory can always be released,
    "--enable-weights-cpu-backup": (True,),  # and weights come back with their values
    "--disable-custom-all-reduce": (True,),  # there is one rank
    "--dist-init-addr": (ANYTHING,),
    "--dist-timeout": (ANYTHING,),
    "--nccl-port": (ANYTHING,),
}
_MORE_FLAGS = {"tp_size": ["--tp"], "dp_size": ["--dp"], "pp_size": ["--pp"]}
_ONE_DEVICE = "start one server per device behind a router"
_REMEDIES = {
    "tp_size": _ONE_DEVICE,
    "dp_size": _ONE_DEVICE,
    "pp_size": _ONE_DEVICE,
    "ep_size": _ONE_DEVICE,
    "nnodes": _ONE_DEVICE,
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
    """Whether a value asks for nothing: null, false, empty, one of `neutral`, or made of such."""
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


@dataclass(frozen=True, slots=True)
class SGLangArgument:
    """An argument of SGLang's ServerArgs that this runtime does not have.

    Attributes:
        flags: its names on a command line; none for an argument of Python alone.
        takes: values of a flag: 0, 1, `?` or `*`.
        neutral: values that ask for nothing.
    """

    name: str
    flags: tuple[str, ...]
    takes: int | str
    neutral: tuple[Any, ...]

    def problem(self, value: Any, said: str) -> str | None:
        """Why a value cannot be had; None for a neutral one.

        Args:
            said: the flag or argument as the user wrote it.
        """
        if is_neutral(value, self.neutral):
            return None
        values = [item for item in self.neutral if item not in (None, "", [])]
        only = "" if not values or self.takes == 0 else f" (only {values[0]} would change nothing)"
        remedy = _REMEDIES.get(self.name, "leave it out")
        return f"{said}: SGLang has this and this runtime does not{only}; {remedy}."

    def problem_of_flag(self, flag: str, given: str | list[str] | None) -> str | None:
        """`problem` of words on a command line."""
        if self.takes == 0:
            return self.problem(not flag.startswith("--no-"), flag)
        words = given if isinstance(given, list) else [given or ""]
        values = [self._value(word) for word in words]
        return self.problem(values, " ".join([flag, *words[:1]]).strip())

    def _value(self, word: str) -> Any:
        """A word as the neutral value that it is the text of, or the word."""
        for item in self.neutral:
            if isinstance(item, int | float) and not isinstance(item, bool):
                try:
                    return float(word)
                except ValueError:
                    return word
        return word


def missing_arguments(own: Collection[str]) -> dict[str, SGLangArgument]:
    """What SGLang's ServerArgs have beside these, by name."""
    arguments = {}
    for name, (flags, takes, default) in facts()["flags"].items():
        if name not in own:
            neutral = (default, *_MORE_OF_FLAGS.get(f"--{name.replace('_', '-')}", ()))
            names = (*flags, *_MORE_FLAGS.get(name, ()))
            arguments[name] = SGLangArgument(name, names, takes, neutral)
    return arguments


def own_arguments(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Keyword arguments without those of SGLang that ask for nothing; None is a default.

    Raises:
        ValueError: naming an argument of SGLang that this runtime does not have.
    """
    missing = missing_arguments(own) if given.keys() - set(own) else {}
    for name in given.keys() & missing.keys():
        if problem := missing[name].problem(given[name], f"{name}={given[name]!r}"):
            raise ValueError(problem)
    return {k: v for k, v in given.items() if v is not None and k not in missing}
