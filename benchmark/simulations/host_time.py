"""Measures the host's time to plan and observe a step with TileSpec: no device, one thread.

    PYTHONPATH=python:sgl-kernel/python:test/support:. python -m benchmark.simulations.host_time

Decodes come and go with prompts as in `served_rounds`, padded to the sizes of a GPU's graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import served_rounds
from benchmark.command import make_parser, print_rows, store
from benchmark.environment import describe_environment
from served_rounds import MAX_DRAFTS, Load, ServedRounds
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead.draft_planner import DraftPlanner
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_executor.graph_keys import GraphKeys
from tile_spec_decode import Text

SIZES, NUM_BEFORE, NUM_STEPS = (8, 32, 128), 200, 500
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


def step_times_us(num_requests: int) -> list[float]:
    """Returns microseconds of `plan` and `observe` of each step."""
    times, make_parts = list[float](), served_rounds.parts_of

    def timed(call: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        @wraps(call)
        def run(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*arguments)
            us = (time.perf_counter() - start_s) * 1e6
            if begins:
                times.append(us)
            elif times:
                times[-1] += us
            return result

        return run

    def parts_of(num_rows: int) -> Any:
        parts: Any = make_parts(num_rows)
        keys = GraphKeys(GraphSupport.RAGGED_Q, num_rows, 1 + MAX_DRAFTS)
        parts.runners.target.graph_keys = keys
        return parts

    with (
        mock.patch.object(served_rounds, "parts_of", parts_of),
        mock.patch.object(DraftPlanner, "plan", timed(DraftPlanner.plan, True)),
        mock.patch.object(DraftPlanner, "observe", timed(DraftPlanner.observe, False)),
    ):
        ServedRounds(Load(num_requests), Text(0.75, 0.96, 0.45), CUT).rate(NUM_STEPS, NUM_BEFORE)
    return times[NUM_BEFORE:]


if __name__ == "__main__":
    arguments = make_parser(__doc__, "host_time").parse_args()
    torch.set_num_threads(1)
    found = {size: step_times_us(size) for size in SIZES}
    rows = [
        {"requests": size, "median_us": statistics.median(us), "mean_us": statistics.fmean(us)}
        for size, us in found.items()
    ]
    print_rows(rows)
    store(arguments.out, {**describe_environment(), "steps": NUM_STEPS, "rows": rows})
