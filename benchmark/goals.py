"""What this project wants to reach on one H100, and what its peer, SGLang 0.5.16, reaches there.

Llama-3.1-8B geometry, random bfloat16 weights, greedy, no radix cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple


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

GPU_OF_GOALS = "one H100 80GB"


class LoadGoal(NamedTuple):
    """A figure that is asked for, and what the peer reached, where it was measured."""

    asked: float
    peer: float | None


LONG_PROMPTS_GEOMETRY = "llama-3.1-8b"
LONG_PROMPTS = {  # by the name of a case of benchmark.measure.long_prompts, radix cache on
    "1 x 4,096": LoadGoal(0.095, 0.103),
    "1 x 16,384": LoadGoal(0.465, 0.492),
    "1 x 30,000": LoadGoal(1.01, 1.071),
    "16 x 8,192": LoadGoal(4.70, 4.98),
    "64 x 2,048": LoadGoal(4.50, 4.72),
    "128 x 1,024": LoadGoal(4.55, 4.79),
    "128 x 4,096": LoadGoal(36500.0, 35171.0),
    "512 x 512": LoadGoal(6300.0, 5251.0),
    "256 sharing 4,096": LoadGoal(2.4, 2.95),
    "192 x 3,000": LoadGoal(28.0, None),
    "decode, 1": LoadGoal(5.76, 6.34),
    "decode, 8": LoadGoal(5.89, 6.58),
    "decode, 32": LoadGoal(6.31, 7.05),
    "decode, 64": LoadGoal(6.86, 7.73),
    "decode, 128": LoadGoal(8.2, 9.20),
    "decode, 1 at 30,000": LoadGoal(7.4, 7.74),
}
MAX_GAP_RATIO = 1.2  # of the longest gap beside a long prompt to --max-step-ms
HTTP_STREAMS_SHAPE = {
    "geometry": "llama-3.1-8b",
    "clients": 128,
    "input_len": 512,
    "output_len": 128,
}
HTTP_STREAMS = {  # 128 at once, 512 in, 128 out; the peer with Triton
    "tok_s": LoadGoal(6218.0, 5152.0),
    "first_token_p50_ms": LoadGoal(95.0, 936.0),
    "gap_p99_ms": LoadGoal(44.0, 66.0),
}
HTTP_ALONE_FIRST_TOKEN_MS = LoadGoal(15.0, 34.0)  # p50, one request at a time
MIN_HTTP_OVER_ENGINE = 0.95  # tokens/s of streams over HTTP, of an Engine's streams, at least
LOAD_WEIGHTS_S = 15.0  # process start to ready, warm, 16 GB in the page cache, at most
MIN_KV_SHARE = 0.97  # KV tokens of those that fit beside the weights

SMALL_LOADS, MIN_SHARE_OF_TOKENS_PER_STEP = (1, 4), 0.9
BUSY_LOAD, MIN_SHARE_OF_BEST_FIXED_K = 16, 0.95
MIN_RATIO_LOAD_AWARE = 0.97
MIN_RATIO_K_1 = 0.97
MIN_RATIO_STATIC_GRAPHS = 1.8  # static k=3 with graphs beside its eager bypass, one request
MIN_PAIRED_MEDIAN, MIN_PAIRED_ROUND = 0.99, 0.97  # of rounds beside plain: never slower
# By requests at once, ms of a round of EAGLE: 3 steps, 3.0 tokens accepted; the peer with FA3.
EAGLE_ROUND_MS = {
    1: Goal(7.7, 8.67),
    8: Goal(8.4, 12.07),
    32: Goal(9.2, 11.37),
    64: Goal(10.8, 12.60),
    128: Goal(17.3, 18.87),
}
EAGLE_LOAD_TOK_S = Goal(6900.0, 6670.0)  # 512 prompts of 512 in, 128 out, at least
MIN_STANDALONE_SPEED_UP = {1: 1.5}  # by requests at once: with a draft model, of plain decoding
TREE_OVER_CHAIN = 1.03  # of one request: the best tree beside the best chain, at least
MIN_SPEED_UP_OF_ACCEPT_LENGTH = {1: 0.74, 8: 0.70}  # by requests at once, EAGLE-3 beside plain
# All tokens/s of work that changes: adaptive steps beside the best fixed number, and beside 3.
ADAPTIVE_OVER_BEST_FIXED, ADAPTIVE_OVER_FIXED_3 = 1.05, 1.15
# Of adaptive steps on work that stays the same, at each number of requests at once.
STATIONARY_OVER_BEST_FIXED = 0.99  # speed beside the best fixed number, at least
SWITCHES_PER_S = 1.0  # fewer than this
NGRAM_REPEATS_SPEED_UP = 2.0  # of text that repeats itself, one request beside plain, at least
NGRAM_HOST_US = 300.0  # host time that NGRAM adds to a step of 64 requests, less than this
PROFILING_S, PROFILING_FROM_CACHE_S = 20.0, 0.2  # measuring or reading TileSpec's prices, at most
SWITCH_US = 100.0  # host time that a switch of tiers adds, less than this
TIERS_MEMORY_RATIO = 1.3  # of the graphs of all tiers to those of the deepest alone, at most


def is_steady(way: dict[str, Any]) -> bool:
    """Whether an adaptive way did on work that stays the same what is asked.

    Args:
        way: of `benchmark.measure.adaptive_stationary`.
    """
    return bool(
        way["over_best_fixed"] >= STATIONARY_OVER_BEST_FIXED
        and way["switches_per_s"] < SWITCHES_PER_S
        and way["over_plain"] >= MIN_PAIRED_MEDIAN
        and way["lowest_over_plain"] >= MIN_PAIRED_ROUND
    )


MIN_SPEED_BESIDE_COSTLY = 0.9  # of a plain stream, beside as many plain requests
