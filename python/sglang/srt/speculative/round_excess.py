"""By how much rounds take longer than their prices.

Prices are measured while a GPU is cool. Under load it lowers its clocks, the more the wider steps
are, and the host may launch the pieces of a step more slowly than they are computed. So rounds are
timed while they serve.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY_ROUNDS = 64.0  # that each bucket remembers
PRIOR_ROUNDS = 4.0  # that the neighbours count as where nothing was seen
LEAST, MOST = 0.5, 2.0  # of one round: what is beyond met something else


class Excess:
    """What rounds take divided by their prices, by rows: means of buckets that double in size,
    interpolated between these, and 1 before anything is known."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}  # by bucket
        self._weights: dict[int, float] = {}
        self._places: list[float] = []  # of the buckets seen, ascending: binary logarithms of rows
        self._values: list[float] = []

    def observe(self, num_rows: int, price_ms: float, took_ms: float) -> None:
        """Hears of a round of so many rows, those of prompts counted."""
        ratio, bucket = min(max(took_ms / price_ms, LEAST), MOST), (num_rows - 1).bit_length()
        known = self._ratios.get(bucket, self.at(num_rows))
        weight = min(self._weights.get(bucket, PRIOR_ROUNDS) + 1.0, MEMORY_ROUNDS)
        self._ratios[bucket] = known + (ratio - known) / weight
        self._weights[bucket] = weight
        buckets = sorted(self._ratios)
        self._places = [bucket - 0.5 for bucket in buckets]
        self._values = [self._ratios[bucket] for bucket in buckets]

    def at(self, num_rows: int) -> float:
        """Of rounds of so many rows; without numpy, which takes ten times as long for one."""
        places, values = self._places, self._values
        if not places:
            return 1.0
        place = math.log2(num_rows)
        right = bisect.bisect_left(places, place)
        if right in (0, len(places)):
            return values[max(0, right - 1)]
        share = (place - places[right - 1]) / (places[right] - places[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])

    def of(self, num_rows: Sequence[int]) -> NDArray[np.float64]:
        """[n]; of rounds of each number of rows."""
        if not self._places:
            return np.ones(len(num_rows))
        return np.interp(np.log2(num_rows), self._places, self._values)
