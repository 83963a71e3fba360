"""Measures the times of launches, on a GPU and on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

from sglang.srt.step.price_table import Curve

Item = TypeVar("Item")

Launch = Callable[[], object]  # returns when the work is in a GPU's queue, maybe not done
Agree = Callable[[float], float]  # gives all ranks one number of what each has measured

CPU_MIN_SIZES, CPU_MAX_PASSES = 2, 3
IMPLAUSIBLE_GROWTH, CPU_RETRIES = 1.5, 2
MOST_RUNS = 3  # on a GPU, for each that counts


def shown(items: Sequence[Item], what: str, device: torch.device) -> Iterable[Item]:
    """Yields the items; on a GPU, in a terminal, a progress bar names the item that is timed."""
    is_hidden = True if device.type == "cpu" else None  # None: shown in a terminal
    return tqdm(items, desc=f"Measuring {what}", unit="size", disable=is_hidden)


def gpu_times_ms(launch: Launch, repeats: int, agree: Agree) -> list[float]:
    """Returns the milliseconds of `repeats` runs after a first one, by the GPU's own clock. Runs
    are launched before any is waited for. While the host launches more slowly than the GPU
    computes, the GPU waits and the times are the host's. Such a run does not count, and another
    follows it, up to MOST_RUNS for each that is to count; if none does, all are returned."""
    launch()
    ends, are_in_time = [_recorded_event()], list[bool]()
    missing = repeats
    while missing > 0 and len(are_in_time) < MOST_RUNS * repeats:
        for _ in range(min(missing, MOST_RUNS * repeats - len(are_in_time))):
            launch()
            are_in_time.append(not ends[-1].query())  # queued before the last run had ended
            ends.append(_recorded_event())
        missing = round(agree(repeats - sum(are_in_time)))
    ends[-1].synchronize()
    times = [agree(first.elapsed_time(second)) for first, second in itertools.pairwise(ends)]
    counts = [bool(agree(is_in_time)) for is_in_time in are_in_time]
    return [*itertools.compress(times, counts)] or times


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def shortest(times: Mapping[int, Sequence[float]]) -> Curve:
    """Returns the shortest time of each size, since disturbances only make times longer."""
    return Curve(tuple(times), tuple(min(values) for values in times.values()))


def timed_passes(
    launches: Mapping[int, Launch],
    budget_s: float,
    once_ms: Callable[[Launch], float],
    clock: Callable[[], float],
) -> dict[int, list[float]]:
    """Returns the milliseconds of each size, ascending, from several passes over all sizes, so that
    a slow moment affects one run of many. The first pass warms up and counts only if no other fits
    the budget. Once it has spent half of the budget, larger sizes are left out."""
    start, first = clock(), dict[int, list[float]]()
    spent_s, last_size, last_ms = 0.0, 0, 0.0
    for size, launch in launches.items():
        if len(first) >= CPU_MIN_SIZES and spent_s > budget_s / 2:
            break
        taken_ms = once_ms(launch)
        # A time that grew faster than the size met a slow moment, which must not end the pass.
        most_ms = IMPLAUSIBLE_GROWTH * last_ms * size / max(last_size, 1)
        for _ in range(CPU_RETRIES):
            if not 0 < most_ms < taken_ms or clock() - start > 2 * budget_s:
                break
            taken_ms = min(taken_ms, once_ms(launch))
        first[size] = [taken_ms]
        spent_s += taken_ms / 1e3
        last_size, last_ms = size, taken_ms
    for size, larger in itertools.pairwise(first):
        for _ in range(CPU_RETRIES * (first[size] > first[larger])):
            if clock() - start > 2 * budget_s:
                break
            first[size] = [min(*first[size], once_ms(launches[size]))]
    times: dict[int, list[float]] = {size: [] for size in first}
    for _ in range(CPU_MAX_PASSES):
        if clock() - start + spent_s > 1.2 * budget_s:
            break
        for size, values in times.items():
            values.append(once_ms(launches[size]))
    return times if all(times.values()) else first
