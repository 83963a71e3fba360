"""Follows by how much rounds take longer than their prices.

Prices are measured while a GPU is cool. Under load it lowers its clocks, the more the wider steps
are, and the host may launch the pieces of a step more slowly than they are computed. So rounds are
timed while they serve.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MEMORY_ROUNDS = 64.0  # that each bucket remembers
PRIOR_ROUNDS = 4.0  # that the neighbours count as where nothing was seen
# That all with drafts count as where none of a number of drafts were seen: those of one number take
# about as long each time, and a number that is not chosen is run in few steps.
OWN_PRIOR_ROUNDS = 1.0
LEAST, MOST = 0.5, 2.0  # of one round: what is beyond met something else
OWN_SHARE = 1.05  # at most, of rounds of one number of drafts beside all with about as many rows


class _Bucket(NamedTuple):
    """Means over the rounds that a bucket remembers: what they took divided by their prices, and
    their place, the binary logarithm of their rows."""

    weight: float
    ratio: float
    place: float

    def after(self, ratio: float, place: float) -> _Bucket:
        """With one more round."""
        weight = min(self.weight + 1.0, MEMORY_ROUNDS)
        return _Bucket(
            weight,
            self.ratio + (ratio - self.ratio) / weight,
            self.place + (place - self.place) / weight,
        )


def _bucket(num_rows: int) -> int:
    """The number of a bucket."""
    return (num_rows - 1).bit_length()


class Excess:
    """The ratio of a round's time to its price, by rows: means of buckets that double in size,
    interpolated between the mean places of the rounds seen there, and 1 before any.

    Args:
        prior_rounds: that what is known of others counts as in a bucket that was not seen.
    """

    def __init__(self, prior_rounds: float = PRIOR_ROUNDS) -> None:
        self._prior_rounds = prior_rounds
        self._seen: dict[int, _Bucket] = {}
        self._places: list[float] = []  # of the buckets seen, ascending
        self._values: list[float] = []

    @property
    def is_known(self) -> bool:
        """Tells whether any round was seen."""
        return bool(self._places)

    def has_seen(self, num_rows: int) -> bool:
        """Tells whether any round of about `num_rows` rows was seen."""
        return _bucket(num_rows) in self._seen

    def observe(
        self, num_rows: int, price_ms: float, took_ms: float, prior: float | None = None
    ) -> None:
        """Hears of a round of `num_rows` rows, those of prompts counted.

        Args:
            prior: what was thought of such rounds where none was seen; None: what is known of
                others.
        """
        ratio, place = min(max(took_ms / price_ms, LEAST), MOST), math.log2(num_rows)
        bucket = _bucket(num_rows)
        if bucket not in self._seen:
            ratio_before = self.at(num_rows) if prior is None else prior
            self._seen[bucket] = _Bucket(self._prior_rounds, ratio_before, place)
        self._seen[bucket] = self._seen[bucket].after(ratio, place)
        seen = [self._seen[bucket] for bucket in sorted(self._seen)]
        self._places = [each.place for each in seen]
        self._values = [each.ratio for each in seen]

    def at(self, num_rows: int) -> float:
        """Returns the ratio for rounds of `num_rows` rows; without numpy, which takes ten times as
        long for one."""
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


class RoundsOfTier(NamedTuple):
    """The ratios known of rounds of one number of drafts.

    Attributes:
        own: of these rounds.
        alike: of rounds of all numbers of drafts. It is used where none of this number were seen,
            and this number differs from it by at most OWN_SHARE.
    """

    own: Excess
    alike: Excess

    def at(self, num_rows: int) -> float:
        """See `Excess.at`."""
        alike = self.alike.at(num_rows)
        if not self.own.has_seen(num_rows):
            return alike
        return min(max(self.own.at(num_rows), alike / OWN_SHARE), alike * OWN_SHARE)

    def of(self, num_rows: Sequence[int]) -> NDArray[np.float64]:
        """See `Excess.of`."""
        alike, own = self.alike.of(num_rows), self.own.of(num_rows)
        was_seen = [self.own.has_seen(rows) for rows in num_rows]
        return np.where(was_seen, np.clip(own, alike / OWN_SHARE, alike * OWN_SHARE), alike)


class RoundExcess:
    """Ratios for each number of drafts apart: each runs other graphs, and the prices of each are
    wrong by another share.

    Where no rounds of a number were seen, it is what is known of all rounds with drafts, for 0 of
    plain steps; where none of these were seen either, of the other kind. The estimate of
    one number is clamped to within OWN_SHARE of the estimate over all with about as many rows: a
    number that looks slow is never run again, so its error would never be corrected. Where no other
    number has about as many rows, nothing bounds it.
    """

    def __init__(self) -> None:
        self._plain, self._drafts = Excess(), Excess()
        self._tiers: dict[int, Excess] = {}  # of rounds with drafts

    def observe(self, num_drafts: int, num_rows: int, price_ms: float, took_ms: float) -> None:
        """Hears of a round in which each request had `num_drafts` drafts; the others as for
        `Excess`."""
        seen = self._drafts if num_drafts else self._plain
        known, alike = self.of_rounds(num_drafts), self._alike(num_drafts)
        if num_drafts:
            own = self._tiers.setdefault(num_drafts, Excess(OWN_PRIOR_ROUNDS))
            own.observe(num_rows, price_ms, took_ms, known.at(num_rows))
        seen.observe(num_rows, price_ms, took_ms, alike.at(num_rows))

    def of_rounds(self, num_drafts: int) -> Excess | RoundsOfTier:
        """Returns the ratios of rounds of `num_drafts` drafts; 0: of plain steps."""
        alike, own = self._alike(num_drafts), self._tiers.get(num_drafts)
        return alike if own is None else RoundsOfTier(own, alike)

    def _alike(self, num_drafts: int) -> Excess:
        """Returns the ratios of plain steps, or those of rounds of any number of drafts."""
        own, other = self._plain, self._drafts
        if num_drafts:
            own, other = other, own
        return own if own.is_known else other
