"""Compares ways to do the same work: in turn, on the same prompts, until the ratios are certain.

A way is measured at each load once a round, and the order of the ways is turned from round to
round. A ratio of two ways is taken within a round, so what changes slowly (the clock of the card,
other work of the machine) is in neither. Rounds go on until the 95 % interval of each ratio is
within 0.5 % of it, or the time is spent. A load whose ratios are certain is left out of later
rounds, and so is a way that no ratio still needs.

    paired = Paired(run, loads=[1, 128], pairs=[("drafted", "plain")])
    measure_rounds(paired, Budget(200.0, time.perf_counter()), most_rounds=12, keep=store_rows)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from benchmark.command import in_turn, ratios, store
from benchmark.engine_load import (
    AsyncEngine,
    BlockingEngine,
    Budget,
    LoadResult,
    closed_loop,
    varied_lengths,
)
from benchmark.goals import NARROW

LEAST_ROUNDS = 5  # before a ratio counts as certain: few rounds can agree by luck
FAR, FAR_ROUNDS = 0.1, 3  # an interval that is so far from 1 is certain after fewer
SPEED = "tok_s"  # the figure that ratios are of
# Student's t, 97.5 %, for 1 to 30 degrees of freedom; beyond, the last is a little too large.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MIN_PROMPTS = 4  # of a lap
BUSY, BUSY_LAPS = 64, 2  # so many requests at once are soon done with a lap

Load = TypeVar("Load", bound=Hashable)
Figures = Mapping[str, float]  # of one run, SPEED among them
Pair = tuple[str, str]  # a way, and the one that it is compared with
Run = Callable[[Load, str, int], Figures]  # takes load, way and round; round 0 warms up


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The ratio of two ways over all rounds.

    Attributes:
        mean: the geometric one.
        low, high: ends of its 95 % interval (Student's t over the logarithms); of one round, which
            has none, its ratio.
        lowest: of all rounds.
        ratios: one of each round.
    """

    mean: float
    median: float
    low: float
    high: float
    lowest: float
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Interval:
        """From the ratio of each round, at least one."""
        found = tuple(ratios)
        logs = [math.log(ratio) for ratio in found]
        mean, half = statistics.fmean(logs), 0.0
        if len(logs) > 1:
            quantile = T_QUANTILES[min(len(logs) - 1, len(T_QUANTILES)) - 1]
            half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(
            mean=math.exp(mean),
            median=statistics.median(found),
            low=math.exp(mean - half),
            high=math.exp(mean + half),
            lowest=min(found),
            ratios=found,
        )

    def is_certain(self, least_rounds: int = LEAST_ROUNDS) -> bool:
        """Tells whether there are enough rounds, and the interval is narrow or far from 1."""
        half = max(self.high / self.mean - 1, 1 - self.low / self.mean)
        is_far = self.low > 1 + FAR or self.high < 1 - FAR
        enough = FAR_ROUNDS if is_far else max(2, least_rounds)
        return len(self.ratios) >= enough and (is_far or half <= NARROW)

    def stored(self) -> dict[str, Any]:
        """Gives the fields for a stored result, rounded."""
        fields = asdict(self)
        ratios = [round(ratio, 4) for ratio in fields.pop("ratios")]
        shown = {name: round(value, 4) for name, value in fields.items()}
        return {**shown, "is_certain": self.is_certain(), "ratios": ratios}


class Paired(Generic[Load]):
    """Ways at each load, and their ratios.

    Args:
        run: measures one way at one load.
        pairs: that are to become certain, at all loads or by load.
        ways: all that are measured, in the order of a round; default: those of the pairs.
        least_rounds: before a ratio is certain, and of ways of no pair.
    """

    def __init__(
        self,
        run: Run[Load],
        loads: Sequence[Load],
        pairs: Sequence[Pair] | Mapping[Load, Sequence[Pair]],
        ways: Sequence[str] | None = None,
        least_rounds: int = LEAST_ROUNDS,
    ) -> None:
        self._run = run
        self._least_rounds = least_rounds
        self._pairs = {
            load: tuple(pairs[load] if isinstance(pairs, Mapping) else pairs) for load in loads
        }
        self._found: dict[Load, dict[str, dict[int, Figures]]] = {
            load: {way: {} for way in ways or _ways_of(self._pairs[load])} for load in loads
        }

    def round(self, number: int) -> float:
        """Runs what is not certain yet once; round 0 warms up and does not count. Seconds."""
        start = time.perf_counter()
        runs = [
            (load, way)
            for load, ways in self._found.items()
            for way in in_turn(ways, number)
            if self._is_needed(load, way)
        ]
        for load, way in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            figures = self._run(load, way, number)
            if number:
                self._found[load][way][number] = figures
        return time.perf_counter() - start

    @property
    def is_settled(self) -> bool:
        """Tells whether no ratio needs another round."""
        return not any(
            self._is_needed(load, way) for load, ways in self._found.items() for way in ways
        )

    def interval(self, load: Load, mine: str, other: str) -> Interval:
        """Gives the ratio of two ways at a load, over the rounds that have both."""
        ways = self._found[load]
        rounds = [number for number in ways[mine] if number in ways[other]]
        speeds = [[ways[way][number][SPEED] for number in rounds] for way in (mine, other)]
        return Interval.of(a / b for a, b in zip(*speeds, strict=True) if a and b)

    def figures(self, load: Load) -> dict[str, dict[str, list[Any]]]:
        """Gives rounds of each figure, of each way at a load."""
        return {way: _by_name(found) for way, found in self._found[load].items()}

    def rows(self) -> list[dict[str, Any]]:
        """Gives what was found at each load: figures of each way by round, and the ratios."""
        return [
            {
                "load": load,
                "ways": self.figures(load),
                "ratios": {
                    f"{mine} / {other}": self.interval(load, mine, other).stored()
                    for mine, other in self._pairs[load]
                },
            }
            for load in self._found
        ]

    def _is_needed(self, load: Load, way: str) -> bool:
        """Tells whether a ratio of the way is not certain. A way of no pair has as many rounds as
        a certain ratio needs."""
        pairs = [pair for pair in self._pairs[load] if way in pair]
        if not pairs:
            return len(self._found[load][way]) < self._least_rounds
        return not all(self._is_certain(load, pair) for pair in pairs)

    def _is_certain(self, load: Load, pair: Pair) -> bool:
        if not all(self._found[load][way] for way in pair):
            return False
        return self.interval(load, *pair).is_certain(self._least_rounds)


def _ways_of(pairs: Sequence[Pair]) -> Iterable[str]:
    """Lists the ways of pairs, what others are compared with first."""
    return dict.fromkeys(way for pair in pairs for way in reversed(pair))


def _by_name(found: Mapping[int, Figures]) -> dict[str, list[Any]]:
    """Turns figures of each round into rounds of each figure."""
    names = dict.fromkeys(name for figures in found.values() for name in figures)
    return {name: [figures[name] for figures in found.values()] for name in names}


def measure_rounds(
    paired: Paired[Any],
    budget: Budget,
    most_rounds: int,
    keep: Callable[[], None] = lambda: None,
) -> int:
    """Runs rounds until all ratios are certain, the budget has no room or there are `most_rounds`.

    Args:
        keep: stores what was found, after each round.

    Returns:
        How many rounds count.
    """
    paired.round(0)
    number, last_s = 0, 0.0
    while not paired.is_settled and budget.has_room(number, most_rounds, last_s):
        number += 1
        last_s = paired.round(number)
        keep()
    return number


def store_rounds(
    paired: Paired[Any],
    budget: Budget,
    arguments: argparse.Namespace,
    result: dict[str, Any],
    found: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Measures at most --rounds; after each one the result is stored in --out.

    Args:
        found: gives what the result gets of all rounds; default: `paired.rows`.
    """

    def keep() -> None:
        result["rounds"] = result.get("rounds", 0) + 1
        result["seconds"] = round(time.perf_counter() - budget.start_s, 1)
        result.update(found() if found is not None else {"rows": paired.rows()})
        store(arguments.out, result)

    measure_rounds(paired, budget, arguments.rounds, keep)


def print_ratios(rows: list[dict[str, Any]], asked: Mapping[str, float]) -> None:
    """Prints each ratio with its interval, and what is `asked` of a way's, at least."""
    for row in rows:
        for pair, found in row["ratios"].items():
            ends = f"{found['low']:.3f} to {found['high']:.3f}"
            text = f"{found['mean']:.3f} ({ends}; {len(found['ratios'])} rounds,"
            text += f" lowest {found['lowest']:.3f})"
            least = asked.get(pair.split(" / ")[0])
            if least is not None:
                text += f" asked {least:g}" + ("" if found["mean"] >= least else ": MISSED")
            load = row["load"]
            shown = load if isinstance(load, int) else ", ".join(map(str, load[:2]))
            print(f"{shown!s:>12} {pair:40} {text}")


@dataclass(frozen=True)
class Way:
    """Requests of one kind to one Engine."""

    engine: AsyncEngine
    params: dict[str, Any]


def closed_loops(
    ways: Mapping[str, Way],
    prompts: list[list[int]],
    least_s: float | None = None,
    has_equal_lengths: bool = False,
) -> Run[int]:
    """Makes the run of `Paired` that keeps so many requests at once, on the first prompts.

    The `max_new_tokens` of a way are those of an output on average. Round 0 asks for a quarter.

    Args:
        least_s: that the fastest way's laps take, as round 0 has found; None: one lap, or of many
            requests BUSY_LAPS.
        has_equal_lengths: all outputs are as long; else those of a lap differ.
    """
    lap_s: dict[int, float] = {}

    def laps_of(load: int) -> int:
        if least_s is not None:
            return max(1, math.ceil(least_s / lap_s[load]))
        return BUSY_LAPS if load >= BUSY else 1

    def run(load: int, way: str, number: int) -> Figures:
        chosen = ways[way]
        asked = chosen.params["max_new_tokens"]
        new_tokens = asked if number else max(8, asked // 4)
        params = chosen.params | {"max_new_tokens": new_tokens}
        lap = prompts[: max(MIN_PROMPTS, load, min(2 * load, BUSY))]
        laps = laps_of(load) if number else 1
        lengths = None if has_equal_lengths else varied_lengths(len(lap), new_tokens)
        result = asyncio.run(closed_loop(chosen.engine, lap, params, load, laps, lengths=lengths))
        if not number:
            lap_s[load] = min(lap_s.get(load, math.inf), result.seconds * asked / new_tokens)
        return figures_of(result)

    return run


def batches(
    engines: Mapping[str, BlockingEngine],
    params: Mapping[str, dict[str, Any]],
    prompts: list[list[int]],
    num_tokens: int,
) -> Run[int]:
    """Makes the run of `Paired` that has `num_tokens` answered by batches of so many requests, one
    after the other. A batch ends with its slowest request. Round 0 has one."""

    def run(load: int, way: str, number: int) -> Figures:
        num_batches = math.ceil(num_tokens / load / params[way]["max_new_tokens"])
        num_new = max(1, num_tokens // load // num_batches)
        asked = params[way] | {"max_new_tokens": num_new}
        infos, turns = [], itertools.cycle(prompts)
        start = time.perf_counter()
        for _ in range(num_batches if number else 1):
            batch = [*itertools.islice(turns, load)]
            answers = engines[way].generate(input_ids=batch, sampling_params=asked)
            infos += [answer["meta_info"] for answer in answers]
        seconds = time.perf_counter() - start
        steps = sum(info.get("spec_verify_ct", 0) for info in infos)
        right = sum(info.get("spec_num_correct_drafts", 0) for info in infos)
        accepted = 1 + right / steps if steps else 1.0
        tok_s = len(infos) * num_new / seconds
        return {SPEED: round(tok_s, 1), "accept_length": round(accepted, 3)}

    return run


def over_all(rows: Sequence[dict[str, Any]], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Gives the row of all loads as one work, of which each is an equal share of the tokens."""
    ways = {
        way: [
            round(statistics.harmonic_mean(speeds), 1)
            for speeds in zip(*(row["ways"][way][SPEED] for row in rows), strict=True)
        ]
        for way in rows[0]["ways"]
    }
    found = {
        f"{mine} / {other}": Interval.of(ratios(ways[mine], ways[other])).stored()
        for mine, other in pairs
    }
    speeds_of = {way: {SPEED: speeds} for way, speeds in ways.items()}
    return {"load": ["all"], "ways": speeds_of, "ratios": found}


def figures_of(result: LoadResult) -> Figures:
    """Gives what is stored of a run."""
    return {
        SPEED: round(result.tok_s, 1),
        "tokens_per_step": round(result.tokens_per_step, 4),
    }
