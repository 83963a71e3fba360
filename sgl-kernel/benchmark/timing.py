"""Times an op on a GPU for the benchmarks of this folder, and records what their figures depend on.

Device time: a graph of many calls, so that launches cost what they cost inside a decode graph. Host
time: the Python call alone, without waiting for the GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

CALLS_PER_GRAPH = 20
Argument = TypeVar("Argument")


def device_time_us(
    call: Callable[[Argument], object], copies: list[Argument], repeats: int
) -> float:
    """Median time of one call inside a graph of calls that rotate through `copies`."""
    call(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS_PER_GRAPH):
            call(copies[i % len(copies)])
    times_us = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3 / CALLS_PER_GRAPH)
    return statistics.median(times_us[3:])


def host_time_us(call: Callable[[Argument], object], argument: Argument, repeats: int) -> float:
    """Median time until the call returns, with an idle GPU."""
    times_us = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(argument)
        times_us.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times_us[3:])


def environment(script: str) -> dict[str, object]:
    """Returns what the figures of a script of this folder depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "command": ["python", f"sgl-kernel/benchmark/{script}", *sys.argv[1:]],
    }
