"""Device times by CUDA events: medians, in a short burst, and under a load that lasts."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

COPY_BYTES, REPEATS, WARM_UPS = 1 << 30, 11, 2
REST_S, BURST_REPEATS = 0.2, 3
SUSTAINED_S, MIN_SUSTAINED = 0.5, 4


def copies_to_exceed(cache_bytes: int, num_bytes: int, num_calls: int) -> int:
    """Copies of `num_bytes` that the calls rotate through: when one is read again, `cache_bytes` of
    others have moved since; but no more than there are calls."""
    return min(num_calls, 1 + -(-cache_bytes // num_bytes))


def capture(calls: Sequence[Call], num_calls: int) -> tuple[Callable[[], None], str]:
    """What makes `num_calls` calls, which take turns: the replay of a `graph` or, if none can
    capture them, the calls themselves, to be timed by `events` around many."""

    def run() -> None:
        for index in range(num_calls):
            calls[index % len(calls)]()

    main_stream = torch.cuda.current_stream()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(main_stream)
    with torch.cuda.stream(side):
        run()  # libraries set themselves up for each stream
    main_stream.wait_stream(side)
    try:
        with torch.cuda.graph(graph, stream=side):
            run()
    except RuntimeError:
        torch.cuda.set_stream(main_stream)
        return run, "events"
    return graph.replay, "graph"


def median_us(replay: Callable[[], None], num_calls: int) -> float:
    """Device time of one of the calls that `replay` makes."""
    times_us = []
    for _ in range(WARM_UPS + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()  # keeps the GPU busy while the host launches what is timed
        start.record()
        replay()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3 / num_calls)
    return statistics.median(times_us[WARM_UPS:])


def burst_us(replay: Callable[[], None], num_calls: int) -> float:
    """Device time of one of the calls that `replay` makes, in a few replays after a rest: at the
    clock of a GPU that has just started to work."""
    torch.cuda.synchronize()
    time.sleep(REST_S)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(BURST_REPEATS + 1)]
    for mark in marks:
        replay()  # the first one warms up
        mark.record()
    marks[-1].synchronize()
    times_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times_ms) * 1e3 / num_calls


def sustained_us(replay: Callable[[], None], num_calls: int, expected_us: float) -> float:
    """The same of calls that follow each other for SUSTAINED_S, the mean of the second half: at
    the clock that the GPU keeps under this load.

    Args:
        expected_us: what a call takes, about.
    """
    wanted = math.ceil(SUSTAINED_S * 1e6 / (expected_us * num_calls))
    count = max(wanted, MIN_SUSTAINED)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(count):
        if index == count // 2:
            start.record()
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / ((count - count // 2) * num_calls)


def copy_gb_s(device: torch.device) -> float:
    """Bandwidth of a large copy; what is read and what is written both count."""
    source, target = torch.empty((2, COPY_BYTES), dtype=torch.uint8, device=device).random_()
    replay, _ = capture([lambda: target.copy_(source)], 4)
    return 2 * COPY_BYTES / median_us(replay, 4) / 1e3


def cache_bytes(device: torch.device) -> int:
    """Bytes that must move so that nothing from before is left in the L2 cache."""
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 2 * size
