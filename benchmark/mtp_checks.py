"""Kinds of requests of the MTP benchmark, their figures, and what the project asks of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.command import median_ratio
from benchmark.engine_load import LoadResult
from benchmark.goals import (
    BUSY_LOAD,
    MIN_RATIO_K_1,
    MIN_RATIO_LOAD_AWARE,
    MIN_RATIO_STATIC_GRAPHS,
    MIN_SHARE_OF_BEST_FIXED_K,
    MIN_SHARE_OF_TOKENS_PER_STEP,
    SMALL_LOADS,
)

TAU = 0.9
PLAIN, K_1, STATIC_3, VERIFIED = "plain", "k=1", "static k=3", "k=8 verified"
FIXED = {k: f"k={k} tau {TAU:g}" for k in (2, 3, 4, 6, 8)}
LOAD_AWARE = f"k=8 tau {TAU:g} load-aware"


@dataclass(frozen=True)
class Kind:
    """What is sent, and to which Engine.

    Attributes:
        is_load_aware: to the one that shortens unverified requests too.
    """

    params: dict[str, Any]
    is_load_aware: bool = False


def _adaptive(k: int) -> dict[str, Any]:
    return {"mtp_enabled": True, "mtp_k": k, "mtp_strategy": ["conf_adapt", TAU]}


KINDS: dict[str, Kind] = {
    PLAIN: Kind({"temperature": 0}),
    K_1: Kind({"mtp_enabled": True, "mtp_k": 1}),
    STATIC_3: Kind({"mtp_enabled": True, "mtp_k": 3}),
    **{name: Kind(_adaptive(k)) for k, name in FIXED.items()},
    LOAD_AWARE: Kind(_adaptive(8), is_load_aware=True),
    VERIFIED: Kind({"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "temperature": 0}),
}


@dataclass
class Samples:
    """Results of one number of requests at once, by kind, one per round."""

    num_requests: int
    by_kind: dict[str, list[LoadResult]] = field(default_factory=dict)

    def add(self, kind: str, result: LoadResult) -> None:
        self.by_kind.setdefault(kind, []).append(result)

    def row(self) -> dict[str, Any]:
        """Medians; a ratio is the median of the ratios within a round."""
        kinds = {}
        for name, results in self.by_kind.items():
            per_step = statistics.median(result.tokens_per_step for result in results)
            kinds[name] = {
                "tok_s": round(statistics.median(result.tok_s for result in results), 1),
                "ratio_to_plain": round(self.ratio(name, PLAIN), 4),
                "tokens_per_step": round(per_step, 4),
                "tok_s_by_round": [round(result.tok_s, 1) for result in results],
                "requests_finished": sum(result.num_finished for result in results),
            }
        return {"requests": self.num_requests, "kinds": kinds}

    def measured(self, *kinds: str) -> list[str]:
        """Those of `kinds` that have results."""
        return [kind for kind in kinds if kind in self.by_kind]

    def ratio(self, kind: str, other: str) -> float:
        """Tokens per second beside another kind's."""
        mine, theirs = ([result.tok_s for result in self.by_kind[name]] for name in (kind, other))
        return median_ratio(mine, theirs)


def checks_of(samples: Sequence[Samples]) -> list[dict[str, Any]]:
    """All that is asked and measured; kinds and numbers of requests left out are not judged."""
    by_load = {sample.num_requests: sample for sample in samples}
    checks = []
    if 1 in by_load and FIXED[8] in by_load[1].by_kind:
        tokens_per_step = by_load[1].row()["kinds"][FIXED[8]]["tokens_per_step"]
        for load in (load for load in SMALL_LOADS if load in by_load):
            for kind in by_load[load].measured(FIXED[8], LOAD_AWARE):
                share = by_load[load].ratio(kind, PLAIN) / tokens_per_step
                what = f"{kind}: tok/s / (plain tok/s x {tokens_per_step:.3f} tokens/step)"
                checks.append(_check(what, load, share, MIN_SHARE_OF_TOKENS_PER_STEP))
    all_k = (LOAD_AWARE, *FIXED.values())
    if BUSY_LOAD in by_load and by_load[BUSY_LOAD].measured(*all_k) == [*all_k]:
        ratios = {k: by_load[BUSY_LOAD].ratio(LOAD_AWARE, name) for k, name in FIXED.items()}
        best = min(ratios, key=lambda k: ratios[k])
        what = f"{LOAD_AWARE}: tok/s / tok/s of the best fixed k (k={best})"
        checks.append(_check(what, BUSY_LOAD, ratios[best], MIN_SHARE_OF_BEST_FIXED_K))
    for load, sample in by_load.items():
        asked = {LOAD_AWARE: MIN_RATIO_LOAD_AWARE, K_1: MIN_RATIO_K_1}
        for kind in sample.measured(*asked):
            what = f"{kind}: tok/s / plain tok/s"
            checks.append(_check(what, load, sample.ratio(kind, PLAIN), asked[kind]))
    return checks


def static_graph_check(ratio: float) -> dict[str, Any]:
    """Static k=3 with graphs beside its eager bypass."""
    what = "static k=3: tok/s with CUDA graphs / tok/s with --disable-mtp-cuda-graph"
    return _check(what, 1, ratio, MIN_RATIO_STATIC_GRAPHS)


def _check(what: str, load: int, value: float, asked: float) -> dict[str, Any]:
    return {
        "what": what,
        "requests": load,
        "value": round(value, 4),
        "asked": asked,
        "passed": value >= asked,
    }
