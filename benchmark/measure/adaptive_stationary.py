"""On work that stays the same, are adaptive steps as fast as the best fixed number?

The bundled model and its EAGLE-3 head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`).
A load is so many requests at once, all the time, on one kind of text: held-out code, greedy, or
random prompts, sampled hot with seeds. Requests differ in length, or else those of a server without
drafts, which begin one by one, would also end one by one for ever. One Engine per way to choose
steps, all side by side on one GPU. They take turns load by load, with the same prompts. Each run
has laps that do not count, in which an adaptive way settles, and then laps that do. Round 0 is not
counted: it tells how many laps there are to be, and which fixed numbers are so slow on a load that
they need not be measured there. What is asked: `goals.py`. Stored after each round.

    python -m benchmark.measure.adaptive_stationary --model-dir FOLDER      on a GPU
    python -m benchmark.measure.adaptive_stationary --model-path demo --device cpu \\
        --concurrency 1 2 --new-tokens 16 --steady-s 0.5 --lead-s 0.5 --rounds 1
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import sglang
from benchmark.adaptive_ways import (
    ADAPTIVE,
    FIXED,
    KINDS,
    PLAIN,
    WAYS,
    Texts,
    configured_ways,
    engine_ways,
    num_switches,
    params_of,
    state_of,
)
from benchmark.command import median_ratio, ratios
from benchmark.drafters import drafter_flags
from benchmark.engine_load import Budget, closed_loop
from benchmark.environment import describe_environment
from benchmark.goals import is_steady
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from benchmark.paired import MIN_PROMPTS, SPEED, Figures, Interval, Paired, store_rounds
from benchmark.ways import start_engines

SLOW = 0.85  # fixed numbers below this share of the best one's speed in round 0 are left out
LEAST_LENGTH = 0.75  # of a request, as a share of the mean
DEFAULT_WAYS = (PLAIN, "fixed 1", "fixed 3", "EMA, conservative", "auto")
CONFIGURED = tuple(configured_ways("FILE"))  # the names alone


class Load(NamedTuple):
    """So many requests at once, all the time, on one kind of text."""

    requests: int
    kind: str


class Laps(NamedTuple):
    """Tells how many passes through the prompts of a load there are.

    Attributes:
        lead: before those that count.
        counted: that count.
    """

    lead: int
    counted: int


def lengths_around(mean: int, count: int, luck: random.Random) -> list[int]:
    """From LEAST_LENGTH to 2 - LEAST_LENGTH times the mean, evenly, in any order."""
    steps = [(2 * index + 1) / count - 1 for index in range(count)]
    found = [max(1, round(mean * (1 + (1 - LEAST_LENGTH) * step))) for step in steps]
    luck.shuffle(found)
    return found


def laps_of(lap_s: float, lead_s: float, steady_s: float) -> Laps:
    """So many that they take as long as asked, where one takes `lap_s`."""
    return Laps(max(1, math.ceil(lead_s / lap_s)), max(1, math.ceil(steady_s / lap_s)))


def ways_to_measure(warm: Mapping[str, Figures]) -> list[str]:
    """All but fixed numbers that were slow in a round, which gave `warm`."""
    speeds = {name: figures[SPEED] or 0.0 for name, figures in warm.items()}
    least = SLOW * max(speed for name, speed in speeds.items() if name in FIXED)
    return [name for name, speed in speeds.items() if name not in FIXED or speed >= least]


class SteadyLoads:
    """Laps of loads on Engines: the run of `Paired`, and what it does after round 0.

    Attributes:
        laps: of each load. The laps before those that count are one of ways that do not adapt.
    """

    def __init__(
        self, engines: Mapping[str, sglang.Engine], texts: Texts, arguments: argparse.Namespace
    ) -> None:
        self._engines, self._texts, self._arguments = engines, texts, arguments
        self.laps: dict[Load, Laps] = {}

    def run(self, load: Load, way: str, number: int) -> Figures:
        """Gives the figures of the laps that count; the prompts are the same for all ways, others
        in each round."""
        engine, states = self._engines[way], list[dict[str, Any]]()
        lead, counted = self.laps.get(load, Laps(1, 1))
        seed = 1000 * number + load.requests
        count, num_new = max(MIN_PROMPTS, load.requests), self._arguments.new_tokens

        async def note_state() -> None:
            states.append(await asyncio.to_thread(state_of, engine))

        result = asyncio.run(
            closed_loop(
                engine,
                self._texts.draw(load.kind, count, seed),
                params_of(load.kind, num_new, seed),
                load.requests,
                counted,
                lead_laps=1 if way in (PLAIN, *FIXED) else lead,
                on_edge=note_state,
                lengths=lengths_around(num_new, count, random.Random(seed)),
            )
        )
        return {
            SPEED: result.tok_s,
            "seconds": result.seconds,
            "switches": num_switches(states),
            "steps_at_end": states[-1]["speculative_num_steps"],
        }

    def choose(self, load: Load, warm: Mapping[str, Figures]) -> list[str]:
        """Tells which ways are measured, and sets the laps of the load by the fastest way, so that
        it too takes as long as asked."""
        lap_s = min(figures["seconds"] or 0.0 for figures in warm.values())
        self.laps[load] = laps_of(lap_s, self._arguments.lead_s, self._arguments.steady_s)
        return ways_to_measure(warm)


def summarize(found: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, Any]:
    """The ways on one load, each beside plain and beside the best fixed number of this load."""
    medians = {name: statistics.median(each[SPEED]) for name, each in found.items()}
    best = max((name for name in FIXED if name in found), key=medians.__getitem__)
    ways = []
    for name, each in found.items():
        over_plain = ratios(each[SPEED], found[PLAIN][SPEED])
        ways.append(
            {
                "way": name,
                "is_adaptive": name not in (PLAIN, *FIXED),
                "tok_s": round(medians[name], 1),
                "all_tok_s": [round(speed, 1) for speed in each[SPEED]],
                "over_best_fixed": round(median_ratio(each[SPEED], found[best][SPEED]), 4),
                "over_plain": round(statistics.median(over_plain), 4),
                "lowest_over_plain": round(min(over_plain), 4),
                "interval_over_plain": Interval.of(over_plain).stored(),
                "switches_per_s": round(sum(each["switches"]) / sum(each["seconds"]), 3),
                "seconds": [round(seconds, 2) for seconds in each["seconds"]],
                "steps_at_end": each["steps_at_end"],
            }
        )
    return {"best_fixed": best, "ways": ways}


def measure(
    arguments: argparse.Namespace, model_path: str, drafter: Mapping[str, Any], budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    texts = Texts(arguments, model_path, 2 * max(MIN_PROMPTS, *arguments.concurrency))
    loads = [Load(*each) for each in itertools.product(arguments.concurrency, arguments.kinds)]
    known = WAYS | configured_ways(arguments.config)
    ways = {name: known[name] for name in arguments.ways}
    result = {**describe_environment(), **settings(arguments), "prompts": texts.source}
    result |= {"flags_of_ways": ways, "lead_s": arguments.lead_s, "steady_s": arguments.steady_s}
    result["least_length"] = LEAST_LENGTH
    with ExitStack() as stack:
        flags = engine_flags(arguments, model_path)
        flags["context_length"] += math.ceil((1 - LEAST_LENGTH) * arguments.new_tokens)
        engines = start_engines(stack, engine_ways(ways), flags, drafter)
        result["started_s"] = round(time.perf_counter() - budget.start_s, 1)
        steady = SteadyLoads(engines, texts, arguments)
        paired = Paired(steady.run, loads, [], [*ways], arguments.rounds, steady.choose)

        def found() -> dict[str, Any]:
            rows = [
                {**load._asdict(), **steady.laps[load]._asdict(), **summarize(paired.figures(load))}
                for load in loads
            ]
            return {"rows": rows}

        store_rounds(paired, budget, arguments, result, found)
    return result


def print_result(result: dict[str, Any]) -> None:
    """Each way on each load, and for the adaptive ones whether it is as asked."""
    print(f"\n{result['rounds']} rounds, {result['seconds']:.0f} s, started in", end=" ")
    print(f"{result['started_s']:.0f} s")
    for row in result["rows"]:
        print(f"{row['requests']} at once, {row['kind']}; best fixed number: {row['best_fixed']}")
        for way in row["ways"]:
            verdict = ("ok" if is_steady(way) else "MISS") if way["is_adaptive"] else ""
            print(
                f"  {verdict:4} {way['way']:22} {way['tok_s']:9,.1f} tok/s,"
                f" {way['over_best_fixed']:.3f} of the best fixed, {way['over_plain']:.3f} of plain"
                f" (lowest {way['lowest_over_plain']:.3f}), {way['switches_per_s']:.2f} switches/s"
            )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "adaptive_stationary")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 96, 128])
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of text")
    names = (*WAYS, *CONFIGURED)
    add("--ways", nargs="+", choices=names, default=list(DEFAULT_WAYS), metavar="WAY")
    add("--config", help=f"--speculative-adaptive-config of the ways {', '.join(CONFIGURED)}")
    add("--lead-s", type=float, default=1.5, help="at least, of laps that do not count")
    add("--steady-s", type=float, default=2.0, help="at least, of the laps that count")
    parser.set_defaults(budget_s=550.0, prompt_tokens=64, algorithm="EAGLE3")
    arguments = parser.parse_args(argv)
    ways = {*arguments.ways}
    if PLAIN not in ways or not ways & {*FIXED}:
        parser.error(f"--ways: '{PLAIN}' and one of {', '.join(FIXED)} are compared with.")
    if not ways & {*ADAPTIVE, *CONFIGURED}:
        parser.error(f"--ways: none of {', '.join((*ADAPTIVE, *CONFIGURED))}.")
    if ways & {*CONFIGURED} and arguments.config is None:
        parser.error(f"--ways {' '.join(sorted(ways & {*CONFIGURED}))}: needs --config.")
    return arguments


def main() -> int:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, drafter_flags(arguments) as drafter:
        print_result(measure(arguments, model_path, drafter, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
