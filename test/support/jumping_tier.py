"""A tier policy that knows nothing: any number of drafts in each step, none in many."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from sglang.srt.registry import TIER_POLICIES
from sglang.srt.speculative.round_prices import RoundPrices, UpcomingRound

JUMPING = "jumping"


class JumpingTier:
    """Chooses at random, for stretches of steps without drafts too."""

    needs_prices = False

    @staticmethod
    def tiers(max_drafts: int) -> tuple[int, ...]:
        return tuple(range(max_drafts + 1))

    def __init__(self, prices: RoundPrices | None, max_drafts: int) -> None:
        self._tiers = self.tiers(max_drafts)
        self._random = random.Random(max_drafts)
        self._num_plain = 0  # steps without drafts that are still to come
        self._most = max_drafts

    def choose(self, upcoming: UpcomingRound) -> int:
        if self._num_plain:
            self._num_plain -= 1
            return 0
        if self._random.random() < 0.1:
            self._num_plain = self._random.choice([2, 5])
        return self._random.choice([*self._tiers, self._most])

    def observe(self, outcomes: Sequence[tuple[int, int]]) -> None:
        assert all(0 <= right <= count for count, right in outcomes)
        assert all(0 < count <= self._most for count, _ in outcomes)
        assert len({count for count, _ in outcomes}) == 1, "A step has one tier."


@contextmanager
def jumping_tiers() -> Iterator[None]:
    """While this lasts `JUMPING` is a tier policy."""
    place = f"{JumpingTier.__module__}:{JumpingTier.__name__}"
    with mock.patch.dict(TIER_POLICIES._entries, {JUMPING: place}):
        yield
