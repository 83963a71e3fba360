"""Measures the times of launches, on a GPU and on a CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

from sglang.srt.step.price_table import Curve

Item = TypeVar("Item")
Launch = Callable[[], object]  # returns when the work is in a GPU's queue, maybe not done

REPEATS, SLOW_ROWS = 2, 1152  # from so many rows on one run tells the time
CPU_MIN_SIZES, CPU_MAX_PASSES = 2, 3
MOST_RUNS = 3  # on a GPU, for each that counts


class GpuTimer:
    """Times launches by the GPU's own clock. `clock` gives seconds of the host, `agree` gives all
    ranks one number of what each has measured."""

    kv_requests, kv_tokens = 32, 1024  # whose attention is measured, and tokens before each
    chunk_rows: tuple[int, ...] = (128, 512, 2048)  # sizes of a prompt's chunks
    # Tokens before them; the pool may have fewer slots, since slots are named repeatedly.
    chunk_kv_tokens, chunk_repeats = 16384, 2
    pass_requests: tuple[int, ...] = (1, 2, 4, *range(8, 129, 8), 256, 512, 1024)  # of drafting

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[float], float] = float,
    ) -> None:
        self._clock, self._agree = clock, agree

    def now(self) -> float:
        """Returns the seconds of the first rank's clock."""
        return self._agree(self._clock())

    def affords(self, launch: Launch, repeats: int, budget_s: float) -> bool:
        """Tells whether so many runs end in time. A GPU's always do."""
        return True

    def times_ms(self, launch: Launch, repeats: int) -> list[float]:
        """Returns the milliseconds of `repeats` runs after a first one, launched before any is
        waited for. Where the GPU waited for the host, times are the host's: such a run does not
        count, and another follows it, up to MOST_RUNS for each; if none counts, all do."""
        launch()
        ends, are_in_time = [_recorded_event()], list[bool]()
        missing = repeats
        while missing > 0 and len(are_in_time) < MOST_RUNS * repeats:
            for _ in range(min(missing, MOST_RUNS * repeats - len(are_in_time))):
                launch()
                are_in_time.append(not ends[-1].query())  # queued before the last run had ended
                ends.append(_recorded_event())
            missing = round(self._agree(repeats - sum(are_in_time)))
        ends[-1].synchronize()
        pairs = itertools.pairwise(ends)
        times = [self._agree(first.elapsed_time(second)) for first, second in pairs]
        counts = [bool(self._agree(is_in_time)) for is_in_time in are_in_time]
        return [*itertools.compress(times, counts)] or times

    def times_of(
        self, sizes: Sequence[int], launch_of: Callable[[int], Launch], budget_s: float, what: str
    ) -> dict[int, list[float]]:
        """Returns the milliseconds of each run, by size; on a CPU within a budget."""
        return {
            size: self.times_ms(launch_of(size), REPEATS if size < SLOW_ROWS else 1)
            for size in self.shown(sizes, what)
        }

    def shown(self, items: Sequence[Item], what: str) -> Iterable[Item]:
        """Yields the items; in a terminal a progress bar names the item that is timed."""
        return tqdm(items, desc=f"Measuring {what}", unit="size", disable=None)


class CpuTimer(GpuTimer):
    """Times launches by the clock: a CPU computes while it launches."""

    kv_requests, kv_tokens = 4, 256
    chunk_rows = (8, 64)
    chunk_kv_tokens, chunk_repeats = 1024, 1
    pass_requests = (1, 2, 4, 8, 16, 32, 64)

    def affords(self, launch: Launch, repeats: int, budget_s: float) -> bool:
        return self._once_ms(launch) * repeats <= budget_s * 1e3

    def times_ms(self, launch: Launch, repeats: int) -> list[float]:
        launch()
        return [self._once_ms(launch) for _ in range(repeats)]

    def _once_ms(self, launch: Launch) -> float:
        start = self._clock()
        launch()
        return self._agree((self._clock() - start) * 1e3)

    def times_of(
        self, sizes: Sequence[int], launch_of: Callable[[int], Launch], budget_s: float, what: str
    ) -> dict[int, list[float]]:
        """Passes several times over all sizes, so that a slow moment affects one run of many. The
        first pass counts only if no other fits the budget; after half of it larger sizes go."""
        launches = {size: launch_of(size) for size in sizes}
        start, first = self.now(), dict[int, list[float]]()
        for size, launch in launches.items():
            if len(first) >= CPU_MIN_SIZES and self.now() - start > budget_s / 2:
                break
            first[size] = [self._once_ms(launch)]
        pass_s, times = self.now() - start, {size: list[float]() for size in first}
        for _ in range(CPU_MAX_PASSES):
            if self.now() - start + pass_s > 1.2 * budget_s:
                break
            for size, values in times.items():
                values.append(self._once_ms(launches[size]))
        return times if all(times.values()) else first

    def shown(self, items: Sequence[Item], what: str) -> Iterable[Item]:
        return items


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def shortest(times: Mapping[int, Sequence[float]]) -> Curve:
    """Returns the shortest time of each size, since disturbances only make times longer."""
    return Curve(tuple(times), tuple(min(values) for values in times.values()))
