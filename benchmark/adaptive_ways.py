"""Ways to choose how many tokens a head drafts, and the text that they are compared on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import sglang
from benchmark.mtp_model import start_engine

PREDICTABLE, UNPREDICTABLE = "predictable", "unpredictable"
KINDS = (PREDICTABLE, UNPREDICTABLE)
HOT = 1.5  # temperature
PLAIN = "no drafts"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{
        f"fixed {steps}": {"speculative_num_steps": steps, "speculative_load_aware": "off"}
        for steps in (1, 3, 7)
    },
    "EMA, conservative": {
        "speculative_adaptive": True,
        "speculative_adaptive_config": "conservative",
        "speculative_num_steps": 3,
    },
    "EMA, aggressive": {
        "speculative_adaptive": True,
        "speculative_adaptive_config": "aggressive",
        "speculative_num_steps": 3,
    },
    "auto": {"speculative_adaptive": True},
}
FIXED = [name for name in WAYS if name.startswith("fixed")]
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


def params_of(kind: str, num_new: int, seed: int) -> dict[str, Any]:
    """Sampling parameters of a kind of text: code is greedy, random prompts are sampled hot.

    Args:
        num_new: tokens of each request.
    """
    params: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "max_new_tokens": num_new}
    if kind == UNPREDICTABLE:
        params |= {"temperature": HOT, "sampling_seed": seed}
    return params


def measures_prices(way: Mapping[str, Any]) -> bool:
    """Whether an Engine with these flags measures prices of rounds when it starts."""
    is_auto = way == WAYS["auto"]
    return is_auto or way.get("speculative_adaptive_strategy") == "throughput"


def switches_of(engine: sglang.Engine) -> int:
    """How often the steps became another number since the start."""
    state = engine.get_server_info()["internal_states"][0]
    return sum(state["speculative_tier_switches"].values())


def start_engines(
    stack: ExitStack, ways: Mapping[str, dict[str, Any]], flags: dict[str, Any], head: str
) -> dict[str, sglang.Engine]:
    """An Engine per way. Those that measure prices start one by one, alone on the GPU; then all
    others together.

    Args:
        stack: shuts them down.
        ways: flags by the name of the way.
        flags: of all Engines.
        head: path of the draft head.
    """

    def start(name: str) -> sglang.Engine:
        drafter = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}
        engine = start_engine(flags, **(drafter if name != PLAIN else {}), **ways[name])
        stack.callback(engine.shutdown)
        return engine

    alone = [name for name in ways if measures_prices(ways[name])]
    engines = {name: start(name) for name in alone}
    others = [name for name in ways if name not in engines]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        engines |= zip(others, pool.map(start, others), strict=True)
    return {name: engines[name] for name in ways}
