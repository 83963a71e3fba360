"""Ways to choose how many tokens a head drafts, and the text that they are compared on."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping
from typing import Any

import sglang
from benchmark.engine_load import random_prompts
from benchmark.held_out import held_out_prompts
from benchmark.ways import EngineWay
from sglang.srt.model_config import load_model_config, resolve_model_path

PREDICTABLE, UNPREDICTABLE = "predictable", "unpredictable"
KINDS = (PREDICTABLE, UNPREDICTABLE)
HOT = 1.5  # temperature
PLAIN = "no drafts"
FIXED = [f"fixed {steps}" for steps in (1, 3, 7)]
_EMA = {"speculative_adaptive": True, "speculative_num_steps": 3}
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{
        name: {"speculative_num_steps": int(name.split()[1]), "speculative_load_aware": "off"}
        for name in FIXED
    },
    "EMA, conservative": {**_EMA, "speculative_adaptive_config": "conservative"},
    "EMA, aggressive": {**_EMA, "speculative_adaptive_config": "aggressive"},
    "auto": {"speculative_adaptive": True},
}
ADAPTIVE = [name for name in WAYS if name not in (PLAIN, *FIXED)]


def configured_ways(config: str | None) -> dict[str, dict[str, Any]]:
    """Both strategies over the slots of a `--speculative-adaptive-config`; none for None."""
    if config is None:
        return {}
    flags = {"speculative_adaptive": True, "speculative_adaptive_config": config}
    return {
        "EMA, configured": flags,
        "throughput, configured": {**flags, "speculative_adaptive_strategy": "throughput"},
    }


def engine_ways(flags: Mapping[str, dict[str, Any]]) -> dict[str, EngineWay]:
    """Makes ways of their flags; all but PLAIN have the head."""
    return {name: EngineWay(flags=each, is_drafted=name != PLAIN) for name, each in flags.items()}


def params_of(kind: str, num_new: int, seed: int) -> dict[str, Any]:
    """Sampling parameters of a kind of text: code is greedy, random prompts are sampled hot.

    Args:
        num_new: tokens of each request.
    """
    params: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "max_new_tokens": num_new}
    if kind == UNPREDICTABLE:
        params |= {"temperature": HOT, "sampling_seed": seed}
    return params


class Texts:
    """Prompts of both kinds.

    Args:
        num_code: prompts of held-out code that are drawn from.

    Attributes:
        source: of the code.
    """

    def __init__(self, arguments: argparse.Namespace, model_path: str, num_code: int) -> None:
        self._length = arguments.prompt_tokens
        self._vocab_size = load_model_config("demo").vocab_size
        folder = resolve_model_path(model_path)
        self._code, self.source = held_out_prompts(folder, num_code, self._length, arguments.seed)

    def draw(self, kind: str, count: int, seed: int) -> list[list[int]]:
        """Returns prompts, the same for the same seed."""
        if kind == PREDICTABLE:
            return random.Random(seed).sample(self._code, count)
        return random_prompts(count, self._length, self._vocab_size, seed)


def state_of(engine: sglang.Engine) -> dict[str, Any]:
    """The scheduler's state."""
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return state


def num_switches(states: Iterable[dict[str, Any]]) -> int:
    """Counts how often the steps became another number between two states."""
    before, after = (sum(state["speculative_tier_switches"].values()) for state in states)
    return int(after - before)
