"""Computes how many drafts a step should verify: their worth, the cost of rows, and the best
number.

Plain arithmetic on the host. A **draft's score** is the product of the head's probabilities along
its chain up to itself, so it is high if the draft and all before it are probably right. A step of
n requests that verifies k drafts has n + k rows: one certain token of each request, and the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LEAST_CHANCE, MOST_CHANCE = 0.01, 0.99  # of a draft, whatever its score is
NUM_BINS = 32
BIN_TRIALS = 256.0  # that each bin remembers
TOLD_ANEW = 4  # chances are computed anew after so many times that it was told of drafts
PRIOR_TRIALS = 8.0  # that the score, taken for the chance, counts as in each bin


class Calibration:
    """The chance that a draft and all before it are confirmed, by the draft's score.

    Scores are put in NUM_BINS bins of equal width. Where little was seen a score is its own chance;
    the share confirmed in each bin corrects that, and pooling of neighbours that fall makes it
    monotone (isotonic regression). Old trials are forgotten as new ones come, in each bin apart, so
    that rare scores keep what they have.

    Only drafts that were verified may be told. Which ones those are must follow from their scores
    alone: then the shares are right whichever were left out.
    """

    def __init__(self) -> None:
        # [2, NUM_BINS]; drafts of each bin, and of these the confirmed ones.
        self._tried, self._confirmed = self._counts = np.zeros((2, NUM_BINS))
        self._centres = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
        self._chances: Floats | None = None  # of the centres; None: to be computed
        self._num_told = 0

    def observe(self, scores: ArrayLike, confirmed: ArrayLike) -> None:
        """Hears of drafts that were verified: [n] scores from 0 to 1, and [n] bool, which of them
        were confirmed, and all before them."""
        told = np.asarray(scores, np.float64)
        if told.size == 0:
            return
        bins = np.minimum((told * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        bins[np.asarray(confirmed, np.bool_)] += NUM_BINS
        found = np.bincount(bins, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)
        found[0] += found[1]
        self._counts += found
        self._counts *= BIN_TRIALS / np.maximum(self._tried, BIN_TRIALS)
        if self._num_told % TOLD_ANEW == 0:
            self._chances = None
        self._num_told += 1

    @property
    def chances(self) -> Floats:
        """Those of the centres of bins; another array once they were computed anew."""
        if self._chances is None:
            weights = self._tried + PRIOR_TRIALS
            shares = (self._confirmed + PRIOR_TRIALS * self._centres) / weights
            self._chances = np.clip(isotonic(shares, weights), LEAST_CHANCE, MOST_CHANCE)
        return self._chances

    def predict(self, scores: ArrayLike) -> Floats:
        """Chances of the same shape; between the centres of bins they are interpolated."""
        return np.interp(np.asarray(scores, np.float64), self._centres, self.chances)


def bounded_scores(values: ArrayLike) -> Floats:
    """The same shape, of numbers from 0 to 1: what is no number is 0, as it is on the device."""
    found: Floats = np.fmax(values, 0.0, dtype=np.float64)
    return np.fmin(found, 1.0)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """[n]; the values that never fall and are closest to these, by weighted squares: neighbours
    that fall are pooled (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, other_count = pools.pop()
            mean = (other * other_weight + mean * total) / (other_weight + total)
            total, count = total + other_weight, count + other_count
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Milliseconds of rounds by the bucket of rows that they are padded to."""

    rows: tuple[int, ...]  # ascending; room of each bucket, of the last one for all drafts
    costs_ms: tuple[float, ...]  # of each, above 0; a larger bucket may be the cheaper one

    def __post_init__(self) -> None:
        assert self.rows, "A table without buckets."
        assert len(self.rows) == len(self.costs_ms), "A bucket has one price."
        assert min(self.costs_ms) > 0, "A round takes time."

    @property
    def most_gain(self) -> float:
        """Share that leaving drafts out could gain at most, were they worth nothing."""
        return self.costs_ms[-1] / min(self.costs_ms) - 1.0


def compute_optimal_k(
    chances: ArrayLike, num_requests: int, table: LatencyTable, least_gain: float = 0.0
) -> int:
    """Returns how many drafts to verify (`best_cut`) of those with such chances, in any order and
    shape, that each and all before it are confirmed."""
    ascending = np.sort(bounded_scores(chances), axis=None)
    return best_cut(expected_right(ascending), num_requests, table, least_gain)[0]


def expected_right(ascending: Floats) -> Floats:
    """Returns [1 + n]: how many of the likeliest 0, 1, ... n drafts are right on average, by their
    chances."""
    sums = np.zeros(1 + ascending.size)
    ascending[::-1].cumsum(out=sums[1:])
    return sums


def best_cut(
    right: Floats, num_requests: int, table: LatencyTable, least_gain: float = 0.0
) -> tuple[int, float]:
    """Computes how many drafts of all requests to verify for most tokens per millisecond.

    The likeliest drafts are taken first. A draft is never likelier than one before it in its
    chain, so with ties broken by position (`RowDivision`) what is taken of a chain is its
    beginning. A round of k drafts is expected to give num_requests + right[k] tokens. Only numbers
    that fill a bucket are looked at: with fewer drafts it costs the same.

    Args:
        right: see `expected_right`.
        least_gain: share by which fewer drafts must beat all of them.

    Returns:
        0 to n, of equally good numbers the largest, and its tokens per millisecond divided by those
        of verifying all, 1 or more.
    """
    most = whole = len(right) - 1
    best, best_rate, rate = most, 0.0, 0.0
    for rows, cost_ms in zip(table.rows, table.costs_ms, strict=True):
        if most and rows >= num_requests:
            whole = min(rows - num_requests, most)
            rate = (num_requests + right.item(whole)) / cost_ms
            if rate >= best_rate:
                best, best_rate = whole, rate
    if best_rate <= rate * (1.0 + least_gain):
        return whole, 1.0
    return best, best_rate / rate
