"""Do drafts that are cut to the rows that pay beat every fixed number of drafts, at every load?

The bundled model and its EAGLE-3 head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`),
prompts of held-out code, greedy. One Engine per way, all side by side on one GPU: no drafts, fixed
numbers of drafts, numbers that follow the load or what was right, and `--tile-spec` over some of
these. They take turns at each number of requests at once (`paired.py`). The result also has the
measured milliseconds of the target's steps by rows, their segments, and how long measuring took.
Before the Engines start, drafts of the bundled model are counted by score (`score_counts.py`); the
inflated one computes the same function. Stored after each round.

    python -m tile_spec.run_bench --model-dir FOLDER      on a GPU
    python -m tile_spec.run_bench --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import sglang
from benchmark.engine_load import Budget
from benchmark.environment import describe_environment
from benchmark.measure.speculation_paired import HEADS, head_path_of
from benchmark.mtp_model import (
    code_prompts,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.paired import Pair, Paired, Way, closed_loops, print_ratios, store_rounds
from benchmark.score_counts import measured_calibration
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


def pairs_of(names: Sequence[str]) -> list[Pair]:
    """Pairs each way with TileSpec with each without; one of fixed numbers is an oracle's."""
    return [
        (mine, other) for mine in names if mine in TILED for other in names if other not in TILED
    ]


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
    """Runs all rounds; the result is stored after each."""
    prompts, source = code_prompts(arguments, model_path)
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
        ways = {name: Way(engine, params) for name, engine in engines.items()}
        run, pairs = closed_loops(ways, prompts), pairs_of(arguments.ways)
        paired = Paired(run, arguments.concurrency, pairs, arguments.ways)
        store_rounds(paired, budget, arguments, result)
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "tile_spec")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 48, 64, 96, 128])
    add("--ways", nargs="+", choices=tuple(WAYS), default=DEFAULT_WAYS, metavar="WAY")
    add("--without-calibration", action="store_true", help="count no drafts by score")
    add("--calibration-prompts", type=int, default=32, help="whose drafts are counted by score")
    parser.set_defaults(budget_s=450.0, rounds=12, algorithm="EAGLE3", new_tokens=256)
    arguments = parser.parse_args(argv)
    assert arguments.algorithm in HEADS
    return arguments


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head:
        print_ratios(measure(arguments, model_path, head, budget)["rows"])


if __name__ == "__main__":
    main()
