"""What this project wants to reach on one H100, and what its peer, SGLang 0.5.16, reaches there.

Llama-3.1-8B geometry, random bfloat16 weights, greedy, no radix cache.
"""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A figure that is asked for, and what the peer reached in the same setting."""

    asked: float
    peer: float


DECODE_MS = {  # by requests in the batch: milliseconds per decode step, at most
    1: Goal(6.05, 6.30),
    8: Goal(6.25, 6.53),
    32: Goal(6.65, 7.11),
    64: Goal(7.1, 7.70),
    128: Goal(8.3, 9.13),
}
THROUGHPUT_TOK_S = Goal(6300.0, 5616.0)  # 512 prompts of 512 in, 128 out, 128 running, at least
THROUGHPUT_SHAPE = {
    "geometry": "llama-3.1-8b",
    "num_prompts": 512,
    "input_len": 512,
    "output_len": 128,
    "max_running_requests": 128,
}
STARTUP_S = {"cold": 40.0, "warm": 25.0}  # process start to the first answer, with Triton, at most
STARTUP_BACKENDS = ("default", "triton")  # that are judged by it
HOST_MS = {64: 2.0}  # by requests in the batch: host time of the scheduler per step, at most

SMALL_LOADS, MIN_SHARE_OF_TOKENS_PER_STEP = (1, 4), 0.9
BUSY_LOAD, MIN_SHARE_OF_BEST_FIXED_K = 16, 0.95
MIN_RATIO_LOAD_AWARE = 0.97
MIN_RATIO_K_1 = 0.97
MIN_RATIO_STATIC_GRAPHS = 1.8  # static k=3 with graphs beside its eager bypass, one request
MIN_PAIRED_MEDIAN, MIN_PAIRED_ROUND = 0.99, 0.97  # of rounds beside plain: never slower
