"""Measures the times of launches, on a GPU and on a CPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from tqdm import tqdm

from sglang.srt.step.price_table import Curve

Launch = Callable[[], object]  # returns when the work is in a GPU's queue, maybe not done

REPEATS, SLOW_ROWS = 2, 1152  # from so many rows on one run tells the time
LEAST_SIZES = 2  # that are timed, however long it takes
MOST_RUNS = 3  # on a GPU, for each that counts
# Yields items while a progress bar in a terminal tells how far it is, after half a second.
shown = partial(tqdm, unit="size", disable=None, delay=0.5)


@dataclass(eq=False)
class GpuTimer:
    """Times launches by the GPU's own clock."""

    agree: Callable[[float], float] = float  # gives all ranks one number of what each has measured
    clock: Callable[[], float] = time.perf_counter  # seconds of the host

    budget_s = math.inf  # for launches of many sizes
    kv_requests, kv_tokens = 32, 1024  # whose attention is measured, and tokens before each
    chunk_rows: ClassVar[tuple[int, ...]] = (128, 512, 2048)  # sizes of a prompt's chunks
    # Tokens before them; the pool may have fewer slots, since slots are named repeatedly.
    chunk_kv_tokens = 16384

    def now(self) -> float:
        """Returns the seconds of the first rank's clock."""
        return self.agree(self.clock())

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
            missing = round(self.agree(repeats - sum(are_in_time)))
        ends[-1].synchronize()
        pairs = itertools.pairwise(ends)
        times = [self.agree(first.elapsed_time(second)) for first, second in pairs]
        counts = [bool(self.agree(is_in_time)) for is_in_time in are_in_time]
        return [*itertools.compress(times, counts)] or times

    def curve_of(
        self, sizes: Sequence[int], launch_of: Callable[[int], Launch], what: str
    ) -> Curve:
        """Returns the shortest time of each size, since disturbances only make times longer. When
        the budget is spent, larger sizes go."""
        start, times = self.now(), dict[int, float]()
        for size in shown(sizes, f"Measuring {what}"):
            if len(times) >= LEAST_SIZES and self.now() - start > self.budget_s:
                break
            repeats = REPEATS if size < SLOW_ROWS else 1
            times[size] = min(self.times_ms(launch_of(size), repeats))
        return Curve(tuple(times), tuple(times.values()))


class CpuTimer(GpuTimer):
    """Times launches by the clock: a CPU computes while it launches."""

    budget_s, most_ms = 0.15, 40.0  # the latter for the runs of one launch
    kv_requests, kv_tokens = 4, 256
    chunk_rows = (8, 64)
    chunk_kv_tokens = 1024

    def times_ms(self, launch: Launch, repeats: int) -> list[float]:
        """Returns the milliseconds of `repeats` runs after a first one, or of fewer when `most_ms`
        are spent; of the first one if that takes as long."""
        times = list[float]()
        while len(times) <= repeats and sum(times) < self.most_ms:
            start = self.clock()
            launch()
            times.append(self.agree((self.clock() - start) * 1e3))
        return times[1:] or times


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
