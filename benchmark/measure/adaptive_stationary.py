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
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tqdm import tqdm

import sglang
from benchmark.adaptive_ways import (
    ADAPTIVE,
    FIXED,
    KINDS,
    PLAIN,
    PREDICTABLE,
    WAYS,
    configured_ways,
    params_of,
    start_engines,
)
from benchmark.command import in_turn, median_ratio, ratios
from benchmark.engine_load import Budget, closed_loop, random_prompts, run_rounds
from benchmark.environment import describe_environment
from benchmark.goals import is_steady
from benchmark.held_out import held_out_prompts
from benchmark.measure.speculation_paired import head_path_of
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from benchmark.paired import Interval
from sglang.srt.model_config import load_model_config, resolve_model_path

MIN_PROMPTS = 4  # of a lap
SLOW = 0.85  # fixed numbers below this share of the best one's speed in round 0 are left out
LEAST_LENGTH = 0.75  # of a request, as a share of the mean
DEFAULT_WAYS = (PLAIN, "fixed 1", "fixed 3", "EMA, conservative", "auto")
CONFIGURED = tuple(configured_ways("FILE"))  # the names alone


class Load(NamedTuple):
    """So many requests at once, all the time, on one kind of text."""

    requests: int
    kind: str


class Laps(NamedTuple):
    """How many passes through the prompts of a load there are.

    Attributes:
        lead: before those that count.
        counted: that count.
    """

    lead: int
    counted: int


class Lap(NamedTuple):
    """Requests of a load.

    Attributes:
        lengths: new tokens of each.
    """

    prompts: list[list[int]]
    params: dict[str, Any]
    lengths: list[int]


@dataclass
class Found:
    """What one way did on one load; one entry per round, of the laps that count."""

    tok_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)
    steps_at_end: list[int] = field(default_factory=list)

    @property
    def switches_per_s(self) -> float:
        return sum(self.switches) / sum(self.seconds)


class Work:
    """Prompts and parameters of all loads; the same for all ways, others in each round."""

    def __init__(self, arguments: argparse.Namespace, model_path: str) -> None:
        self._arguments = arguments
        self._vocab_size = load_model_config("demo").vocab_size
        self._code, self.source = held_out_prompts(
            resolve_model_path(model_path),
            2 * max(MIN_PROMPTS, *arguments.concurrency),
            arguments.prompt_tokens,
            arguments.seed,
        )

    def lap(self, load: Load, number: int) -> Lap:
        """The requests of a lap in round `number`."""
        count, arguments = max(MIN_PROMPTS, load.requests), self._arguments
        seed = 1000 * number + load.requests
        params = params_of(load.kind, arguments.new_tokens, seed)
        lengths = lengths_around(arguments.new_tokens, count, random.Random(seed))
        if load.kind == PREDICTABLE:
            return Lap(random.Random(seed).sample(self._code, count), params, lengths)
        prompts = random_prompts(count, arguments.prompt_tokens, self._vocab_size, seed)
        return Lap(prompts, params, lengths)


def lengths_around(mean: int, count: int, luck: random.Random) -> list[int]:
    """From LEAST_LENGTH to 2 - LEAST_LENGTH times the mean, evenly, in any order."""
    steps = [(2 * index + 1) / count - 1 for index in range(count)]
    found = [max(1, round(mean * (1 + (1 - LEAST_LENGTH) * step))) for step in steps]
    luck.shuffle(found)
    return found


def run_load(
    engine: sglang.Engine,
    lap: Lap,
    load: Load,
    laps: Laps,
    found: Found,
) -> None:
    """Laps of a load on one Engine."""
    states: list[dict[str, Any]] = []

    async def note_state() -> None:
        info = await asyncio.to_thread(engine.get_server_info)
        states.append(info["internal_states"][0])

    result = asyncio.run(
        closed_loop(
            engine,
            lap.prompts,
            lap.params,
            load.requests,
            laps.counted,
            lead_laps=laps.lead,
            on_edge=note_state,
            lengths=lap.lengths,
        )
    )
    before, after = (sum(state["speculative_tier_switches"].values()) for state in states)
    found.tok_s.append(result.tok_s)
    found.seconds.append(result.seconds)
    found.switches.append(after - before)
    found.steps_at_end.append(states[-1]["speculative_num_steps"])


def laps_of(lap_s: float, lead_s: float, steady_s: float) -> Laps:
    """So many that they take as long as asked, where one takes `lap_s`."""
    return Laps(max(1, math.ceil(lead_s / lap_s)), max(1, math.ceil(steady_s / lap_s)))


def ways_to_measure(warm: dict[str, Found]) -> list[str]:
    """All but fixed numbers that were slow in a round, which gave `warm`."""
    speeds = {name: found.tok_s[0] for name, found in warm.items()}
    least = SLOW * max(speed for name, speed in speeds.items() if name in FIXED)
    return [name for name, speed in speeds.items() if name not in FIXED or speed >= least]


class Rounds:
    """Each way's figures on each load.

    Args:
        lead_s: that the laps before those that count take at least; those of ways that do not adapt
            are one lap.
        steady_s: that the laps that count take at least.
    """

    def __init__(
        self,
        engines: dict[str, sglang.Engine],
        work: Work,
        loads: list[Load],
        lead_s: float,
        steady_s: float,
    ) -> None:
        self._engines, self._work = engines, work
        self._lead_s, self._steady_s = lead_s, steady_s
        self._adaptive = {*engines} - {PLAIN, *FIXED}
        self.laps = dict.fromkeys(loads, Laps(1, 1))
        self.found = {load: {name: Found() for name in engines} for load in loads}

    def run(self, number: int) -> float:
        """One round; round 0 warms up and says how many laps the others have. Seconds."""
        start = time.perf_counter()
        runs = [
            (load, name)
            for load, name in itertools.product(self.found, in_turn(self._engines, number))
            if name in self.found[load]
        ]
        for load, name in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            laps = self.laps[load] if name in self._adaptive else self.laps[load]._replace(lead=1)
            lap, found = self._work.lap(load, number), self.found[load][name]
            run_load(self._engines[name], lap, load, laps, found)
        if number == 0:
            for load, warm in self.found.items():
                # By the fastest way, so that it too takes as long as asked.
                lap_s = min(each.seconds[0] for each in warm.values())
                self.laps[load] = laps_of(lap_s, self._lead_s, self._steady_s)
                self.found[load] = {name: Found() for name in ways_to_measure(warm)}
        return time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """One per load."""
        return [
            {**load._asdict(), **self.laps[load]._asdict(), **summarize(found)}
            for load, found in self.found.items()
        ]


def summarize(found: dict[str, Found]) -> dict[str, Any]:
    """The ways on one load, each beside plain and beside the best fixed number of this load."""
    medians = {name: statistics.median(each.tok_s) for name, each in found.items()}
    best = max((name for name in FIXED if name in found), key=medians.__getitem__)
    ways = []
    for name, each in found.items():
        over_plain = ratios(each.tok_s, found[PLAIN].tok_s)
        ways.append(
            {
                "way": name,
                "is_adaptive": name not in (PLAIN, *FIXED),
                "tok_s": round(medians[name], 1),
                "all_tok_s": [round(speed, 1) for speed in each.tok_s],
                "over_best_fixed": round(median_ratio(each.tok_s, found[best].tok_s), 4),
                "over_plain": round(statistics.median(over_plain), 4),
                "lowest_over_plain": round(min(over_plain), 4),
                "interval_over_plain": Interval.of(over_plain).stored(),
                "switches_per_s": round(each.switches_per_s, 3),
                "seconds": [round(seconds, 2) for seconds in each.seconds],
                "steps_at_end": each.steps_at_end,
            }
        )
    return {"best_fixed": best, "ways": ways}


def measure(
    arguments: argparse.Namespace, model_path: str, head: str, budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    work = Work(arguments, model_path)
    loads = [Load(*each) for each in itertools.product(arguments.concurrency, arguments.kinds)]
    known = WAYS | configured_ways(arguments.config)
    ways = {name: known[name] for name in arguments.ways}
    result = {**describe_environment(), **settings(arguments), "prompts": work.source}
    result |= {"flags_of_ways": ways, "lead_s": arguments.lead_s, "steady_s": arguments.steady_s}
    result["least_length"] = LEAST_LENGTH
    with ExitStack() as stack:
        flags = engine_flags(arguments, model_path)
        flags["context_length"] += math.ceil((1 - LEAST_LENGTH) * arguments.new_tokens)
        engines = start_engines(stack, ways, flags, head)
        result["started_s"] = round(time.perf_counter() - budget.start_s, 1)
        rounds = Rounds(engines, work, loads, arguments.lead_s, arguments.steady_s)
        rounds.run(0)
        result["warmed_up_s"] = round(time.perf_counter() - budget.start_s, 1)
        run_rounds(rounds, budget, arguments, result)
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
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head:
        print_result(measure(arguments, model_path, head, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
