"""Do drafts that are cut to the rows that pay beat every fixed number of drafts, at every load?

The bundled model and its EAGLE-3 head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`),
prompts of held-out code, greedy. One Engine per way, all side by side on one GPU: no drafts, fixed
numbers of drafts, numbers that follow the load or what was right, and `--tile-spec` over some of
these. They take turns at each number of requests at once. Beside speeds the result has the measured
milliseconds of the target's steps by rows, their segments, and how long measuring took. Before the
Engines start, drafts of the bundled model are counted by score (`score_counts.py`); the inflated
one computes the same function. Stored after each round.

    python -m tile_spec.run_bench --model-dir FOLDER      on a GPU
    python -m tile_spec.run_bench --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, median_ratio, ratios
from benchmark.engine_load import Budget, LoadResult, closed_loop, run_rounds
from benchmark.environment import describe_environment
from benchmark.goals import MIN_PAIRED_MEDIAN, MIN_PAIRED_ROUND
from benchmark.held_out import held_out_prompts
from benchmark.measure.speculation_paired import HEADS, head_path_of
from benchmark.mtp_model import (
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.paired import Interval
from benchmark.score_counts import measured_calibration
from sglang.srt.model_config import resolve_model_path
from sglang.srt.speculative.tile_spec.profiler import (
    FILE_NAME,
    Profile,
    cheapest_graphs,
    code_digest,
    latency_of,
    read_profile,
)
from sglang.srt.step.price_table import no_graphs

PLAIN = "plain"
MOST_STEPS = 7
STATIC = {
    f"static {steps}": {"speculative_num_steps": steps, "speculative_load_aware": "off"}
    for steps in range(1, MOST_STEPS + 1)
}
OTHERS: dict[str, dict[str, Any]] = {
    "load-aware 3": {"speculative_num_steps": 3},
    f"load-aware {MOST_STEPS}": {"speculative_num_steps": MOST_STEPS},
    "adaptive": {"speculative_adaptive": True},
}
TILED = {
    f"TileSpec, {name}": {**flags, "tile_spec": True} for name, flags in (OTHERS | STATIC).items()
}
SWEPT_DRAFTS = {3: (1.0, 1.5, 2.0), 5: (1.0, 1.5, 2.0, 3.0), 7: (1.5, 2.5, 4.0)}  # by steps
# So many drafts of a request are verified on average, the likeliest of all: an oracle of TileSpec's
# choice is the best of these.
SWEPT: dict[str, dict[str, Any]] = {
    f"swept {steps}:{count:g}": {**STATIC[f"static {steps}"], "tile_spec": True}
    for steps, counts in SWEPT_DRAFTS.items()
    for count in counts
}
WAYS: dict[str, dict[str, Any]] = {PLAIN: {}, **STATIC, **OTHERS, **TILED, **SWEPT}
DEFAULT_WAYS = [
    PLAIN,
    "static 1",
    "static 3",
    f"static {MOST_STEPS}",
    f"TileSpec, load-aware {MOST_STEPS}",
]
DRAFTS = "SGLANG_TILE_SPEC_DRAFTS"
MIN_PROMPTS, FEW = 8, 64  # of a lap; of few requests at once, 4 for each up to FEW
BUSY, BUSY_LAPS = 64, 2  # so many requests at once are soon done with a lap
FIGURES = ("tok_s", "tokens_per_step", "verified_drafts")  # of each way, one of each round


class Rounds:
    """Speeds of all ways at each number of requests at once, one per round."""

    def __init__(
        self,
        engines: Mapping[str, sglang.Engine],
        prompts: list[list[int]],
        loads: Sequence[int],
        params: dict[str, Any],
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._params = params
        pairs = itertools.product(loads, engines)
        self._found: dict[tuple[int, str], list[LoadResult]] = {pair: [] for pair in pairs}

    def run(self, number: int) -> float:
        """One round; round 0 warms up with shorter answers and is not counted. Seconds."""
        start, params = time.perf_counter(), self._params
        if number == 0:
            params = params | {"max_new_tokens": -(-params["max_new_tokens"] // 4)}
        loads = {load: None for load, _ in self._found}
        runs = [*itertools.product(loads, in_turn(self._engines, number))]
        for load, name in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            engine, prompts = self._engines[name], self._prompts[: num_prompts(load)]
            laps = BUSY_LAPS if number and load >= BUSY else 1
            result = asyncio.run(closed_loop(engine, prompts, params, load, laps))
            if number:
                self._found[load, name].append(result)
        return time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """Of each number of requests, what each way did."""
        rows: dict[int, dict[str, Any]] = {}
        for (load, name), results in self._found.items():
            row = rows.setdefault(load, {"requests": load} | {key: {} for key in FIGURES})
            row["tok_s"][name] = [round(result.tok_s, 1) for result in results]
            row["tokens_per_step"][name] = [round(result.tokens_per_step, 3) for result in results]
            verified = [result.verified_drafts for result in results]
            row["verified_drafts"][name] = [each and round(each, 3) for each in verified]
        return [row | summarize(row["tok_s"]) for row in rows.values()]


def num_prompts(load: int) -> int:
    """Of a lap with so many requests at once: the shorter one is, the less it says."""
    return max(MIN_PROMPTS, min(4 * load, FEW), load)


def summarize(tok_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of one number of requests: the best fixed number of drafts, and each way with TileSpec beside
    it, beside the same without, and beside no drafts; medians of the rounds' ratios. `beside` has
    the mean ratio to each fixed number, and its 95 % interval.

    Args:
        tok_s: by way, one of each round.
    """
    fixed = [name for name in tok_s if name in STATIC]
    best = max(fixed, key=lambda name: statistics.median(tok_s[name]), default=None)
    swept = [name for name in tok_s if name in SWEPT]
    oracle = max(swept, key=lambda name: statistics.median(tok_s[name]), default=None)
    found: dict[str, Any] = {"best_static": best, "best_swept": oracle, "tile_spec": {}}
    found["beside"] = {
        f"{name} / {other}": Interval.of(ratios(tok_s[name], tok_s[other])).stored()
        for name in tok_s
        if name in TILED
        for other in fixed
    }
    for name in (name for name in tok_s if name in TILED):
        without = name.removeprefix("TileSpec, ")
        beside = {
            "over_best_static": best,
            "over_best_swept": oracle,
            "over_the_same": without,
            "over_plain": PLAIN,
        }
        figures = {
            key: round(median_ratio(tok_s[name], tok_s[other]), 4)
            for key, other in beside.items()
            if other in tok_s
        }
        if PLAIN in tok_s:
            figures["lowest_over_plain"] = round(min(ratios(tok_s[name], tok_s[PLAIN])), 4)
        found["tile_spec"][name] = figures
    return found


def kept_profile(caches: Path) -> Profile | None:
    """What the first server with TileSpec has kept."""
    files = sorted(caches.rglob(FILE_NAME))
    return read_profile(files[0], Profile) if files else None


def profiling_s(caches: Path) -> dict[str, float]:
    """Seconds that measuring all prices took a server, and those that a later start needs instead,
    in this process: to read and check the file and the code that was measured, and to make tables.
    Empty where no server has kept any."""
    start = time.perf_counter()
    profile = kept_profile(caches)
    if profile is None:
        return {}
    code_digest.cache_clear()  # this process may have read the code already
    code_digest()
    profile.target.prices.table(no_graphs)
    drafts = profile.head.prices
    drafts.draft_prices(drafts.extend.table(no_graphs))
    from_cache_s = time.perf_counter() - start
    return {"measured": round(profile.measured_s, 2), "from_cache": round(from_cache_s, 4)}


def row_times(caches: Path) -> dict[str, Any]:
    """Milliseconds of the target's steps by rows, of all graphs and larger steps, and the segments
    between their cliffs, from the prices that a server has kept; empty without any."""
    profile = kept_profile(caches)
    if profile is None:
        return {}
    prices = profile.target.prices.table(no_graphs)
    eager = zip(prices.eager.sizes, prices.eager.costs_ms, strict=True)
    return {
        "graphs_ms": [[rows, round(ms, 4)] for rows, ms in cheapest_graphs(prices).items()],
        "eager_ms": [[rows, round(ms, 4)] for rows, ms in eager],
        "segments": [[each.first, each.last] for each in latency_of(prices).segments],
    }


def start_engines(
    stack: ExitStack, names: Sequence[str], flags: dict[str, Any], head: str, caches: Path
) -> tuple[dict[str, sglang.Engine], dict[str, float]]:
    """One per way, one after the other, and the seconds that each took to start. Each with TileSpec
    keeps its prices in a folder of its own, or of all that are swept with as many steps."""
    engines, started_s = {}, {}
    for name in names:
        drafter = dict[str, Any]()
        if name != PLAIN:
            drafter = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}
        if "tile_spec" in WAYS[name]:
            folder = name.split(":")[0]  # those that are swept have the same prices
            drafter["tile_spec_cache_dir"] = str(caches / folder)
        begin = time.perf_counter()
        swept = {DRAFTS: name.split(":")[1]} if name in SWEPT else {}
        with mock.patch.dict(os.environ, swept):
            engines[name] = start_engine(flags, **drafter, **WAYS[name])
        stack.callback(engines[name].shutdown)
        started_s[name] = round(time.perf_counter() - begin, 1)
    return engines, started_s


def measure(
    arguments: argparse.Namespace, model_path: str, head: str, budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    loads = arguments.concurrency
    prompts, source = held_out_prompts(
        resolve_model_path(model_path),
        max(num_prompts(load) for load in loads),
        arguments.prompt_tokens,
        arguments.seed,
    )
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    if not arguments.without_calibration:
        result["calibration"] = measured_calibration(arguments, MOST_STEPS)
    params = {"temperature": 0, "max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    with ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = engine_flags(arguments, model_path)
        engines, result["startup_s"] = start_engines(stack, arguments.ways, flags, head, caches)
        result["profiling_s"] = profiling_s(caches)
        result["row_times"] = row_times(caches)
        rounds = Rounds(engines, prompts, loads, params)
        rounds.run(0)
        run_rounds(rounds, budget, arguments, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """A table of speeds, then the ratios."""
    if "rows" not in result:
        print("No round fitted into --budget-s.")
        return
    names = [*result["rows"][0]["tok_s"]]
    head = "tokens/s, requests at once"
    width = max(len(name) for name in (head, *names))
    loads = "".join(f"{row['requests']:>10d}" for row in result["rows"])
    print(f"\n{head:{width}}{loads}")
    for name in names:
        speeds = [statistics.median(row["tok_s"][name]) for row in result["rows"]]
        print(f"{name:{width}}" + "".join(f"{speed:10,.0f}" for speed in speeds))
    for row in result["rows"]:
        for name, figures in row["tile_spec"].items():
            lowest = figures.get("lowest_over_plain", 1.0)
            is_safe = figures.get("over_plain", 1.0) >= MIN_PAIRED_MEDIAN
            mark = "ok  " if is_safe and lowest >= MIN_PAIRED_ROUND else "MISS"
            shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
            print(f"{mark} {row['requests']:3d} at once, {name}: {shown}")
        for pair, each in row["beside"].items():
            interval = f"{each['mean']:.4f} ({each['low']:.4f} to {each['high']:.4f})"
            print(f"     {row['requests']:3d} at once, {pair}: {interval}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "tile_spec")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 48, 64, 96, 128])
    add("--ways", nargs="+", choices=tuple(WAYS), default=DEFAULT_WAYS, metavar="WAY")
    add("--without-calibration", action="store_true", help="count no drafts by score")
    add("--calibration-prompts", type=int, default=32, help="whose drafts are counted by score")
    parser.set_defaults(budget_s=450.0, algorithm="EAGLE3", new_tokens=256)
    arguments = parser.parse_args(argv)
    assert arguments.algorithm in HEADS
    return arguments


def main() -> None:
    """Measures, prints the table and the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head:
        print_result(measure(arguments, model_path, head, budget))


if __name__ == "__main__":
    main()
