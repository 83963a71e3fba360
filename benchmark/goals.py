"""Lists what this project wants to reach on one H100, and what its peer, SGLang 0.5.16, reaches."""

from __future__ import annotations

from typing import Any, NamedTuple


class HeadlineGoal(NamedTuple):
    """A figure of the headline that is asked for.

    Attributes:
        asked: at most, of milliseconds and seconds; else at least.
        peer: what SGLang 0.5.16 reached on one H100 with FlashAttention 3, where it was measured.
        lowest: of the rounds of a ratio, at least.
    """

    asked: float
    peer: float | None = None
    lowest: float = 0.0


NARROW = 0.005  # half of a 95 % interval that says enough of a ratio, as a share of it
HEADLINE = {  # by the name of a figure of `benchmark.headline`, default flags, radix cache on
    "decode, 1": HeadlineGoal(5.76, 6.33),
    "decode, 8": HeadlineGoal(5.89, 6.60),
    "decode, 32": HeadlineGoal(6.30, 7.08),
    "decode, 64": HeadlineGoal(6.75, 7.77),
    "decode, 128": HeadlineGoal(8.31, 9.19),
    "decode, 1 at 30,000": HeadlineGoal(7.13, 7.69),
    "1 x 4,096": HeadlineGoal(0.097, 0.106),
    "1 x 16,384": HeadlineGoal(0.465, 0.492),
    "1 x 30,000": HeadlineGoal(1.03, 1.074),
    "16 x 8,192": HeadlineGoal(4.75, 5.00),
    "64 x 2,048": HeadlineGoal(4.50, 4.74),
    "128 x 1,024": HeadlineGoal(4.55, 4.82),
    "128 x 4,096": HeadlineGoal(36500.0, 34925.0),
    "512 x 512": HeadlineGoal(6300.0, 5252.0),
    "256 sharing 4,096": HeadlineGoal(2.4, 2.92),
    "HTTP, output": HeadlineGoal(6050.0, 5152.0),  # the peer's with Triton
    "HTTP, first token p50": HeadlineGoal(72.0, 936.0),
    "HTTP, gap p99": HeadlineGoal(33.0, 66.0),
    "start, cold": HeadlineGoal(25.0, 101.0),
    "start, warm": HeadlineGoal(9.0),
    "EAGLE, 1": HeadlineGoal(7.7, 8.62),
    "EAGLE, 8": HeadlineGoal(8.4, 9.03),
    "EAGLE, 32": HeadlineGoal(9.2, 9.92),
    "EAGLE, 64": HeadlineGoal(10.8, 11.7),
    "EAGLE, 128": HeadlineGoal(17.3, 18.3),
    "EAGLE, 512 x 512": HeadlineGoal(7000.0, 6670.0),
    "conf_adapt / plain, 128": HeadlineGoal(0.995, lowest=0.98),
    "verified / plain, 128": HeadlineGoal(1.03),
    "TileSpec / 7 drafts, 1": HeadlineGoal(0.995),
    "TileSpec / 7 drafts, 8": HeadlineGoal(0.995),
    "TileSpec / best fixed drafts, 64": HeadlineGoal(1.03),
}


def is_reached(figure: dict[str, Any], goal: HeadlineGoal) -> bool:
    """Tells whether a figure of the headline is as asked: of a ratio, whether the upper end of its
    interval is, of a wide one NARROW above the mean, and no round is below the lowest. One round
    has no interval, and shows nothing."""
    interval = figure["interval"]
    if interval is not None:
        upper = min(interval["high"], interval["mean"] * (1 + NARROW))
        is_high = upper >= goal.asked and interval["lowest"] >= goal.lowest
        return bool(is_high and len(interval["ratios"]) > 1)
    is_time = figure["unit"].startswith(("s", "ms"))
    return bool(figure["value"] <= goal.asked if is_time else figure["value"] >= goal.asked)


MIN_DETERMINISTIC_OVER_PLAIN = 0.9  # tokens/s with sums in fixed orders, at up to 128 requests
MIN_MAY_ASK_OVER_PLAIN = 0.99  # tokens/s of requests that do not ask for it, where they may
MIN_HIDDEN_OVER_OWN_KIND = 0.97  # tokens/s of requests with files of hidden states, of others
MIN_OPTED_OUT_OVER_PLAIN = 0.99  # tokens/s where no request takes drafts, of a server without any
MIN_HTTP_OVER_ENGINE = 0.95  # tokens/s of streams over HTTP, of an Engine's streams, at least
MIN_TRANSFORMERS_OVER_OWN = 0.97  # tokens/s of decoding by transformers' code
MIN_SPEED_BESIDE_COSTLY = 0.9  # of a plain stream, beside as many plain requests

MIN_PAIRED_MEDIAN, MIN_PAIRED_ROUND = 0.99, 0.97  # of rounds beside plain: never slower
# All tokens/s of work that changes: adaptive steps beside the best fixed number, and beside 3.
ADAPTIVE_OVER_BEST_FIXED, ADAPTIVE_OVER_FIXED_3 = 1.06, 1.15
# Of adaptive steps on work that stays the same, at each number of requests at once.
STATIONARY_OVER_BEST_FIXED = 0.99  # speed beside the best fixed number, at least
SWITCH_US = 100.0  # host time that a switch of tiers adds, less than this
TIERS_MEMORY_RATIO = 1.3  # of the graphs of all tiers to those of the deepest alone, at most
