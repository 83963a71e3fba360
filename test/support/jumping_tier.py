"""Tier policies that know nothing: any number of drafts in each step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.registry import LENGTH_POLICIES

JUMPING, CHANGING, RESTING = "jumping", "changing", "resting"


class JumpingTier:
    """Chooses at random, for stretches of steps without drafts too.

    Attributes:
        may_lack: requests may be given fewer drafts than the tier says.
    """

    needs_prices = reads_matches = may_rest = False
    rests = False

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return tuple(range(options.num_steps + 1))

    def __init__(self, parts: PolicyParts) -> None:
        options = parts.options
        self._tiers = self.tiers(options)
        self.may_lack = False
        self._random = random.Random(options.num_steps)
        self._num_plain = 0  # steps without drafts that are still to come
        self._most = self.settled = options.num_steps

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self.settled = self._choose()
        return Budget(1 + self.settled, rests=self.rests)

    def _choose(self) -> int:
        if self._num_plain:
            self._num_plain -= 1
            return 0
        if self._random.random() < 0.1:
            self._num_plain = self._random.choice([2, 5])
        return self._random.choice([*self._tiers, self._most])

    def observe(self, outcome: StepOutcome) -> None:
        pairs = zip(outcome.num_tried, outcome.num_accepted, strict=True)
        verified = [(tried - 1, taken - 1) for tried, taken in pairs if tried > 1]
        assert all(0 <= right <= count for count, right in verified)
        num_reqs, tier = outcome.record.plan.num_drafted_for, outcome.record.plan.draft_length
        if num_reqs is None:
            assert not verified
            return
        assert num_reqs >= len(verified)
        counts = {count for count, _ in verified}
        if self.may_lack:
            assert max(counts, default=0) <= tier
        else:
            assert counts <= {tier}, "A step has one tier."


class RestingTier(JumpingTier):
    """Rests for stretches of steps, of which it changes its mind in some."""

    may_rest = True

    def _choose(self) -> int:
        if self._num_plain == 0 and self._random.random() < 0.1:
            self._num_plain = self._random.choice([2, 5, 12])
        self.rests = self._num_plain > 0 and self._random.random() < 0.9
        return super()._choose()


class ChangingTier(JumpingTier):
    """Chooses another tier than the last one in each step."""

    def _choose(self) -> int:
        return self._random.choice([tier for tier in self._tiers if tier != self.settled])


@contextmanager
def jumping_tiers() -> Iterator[None]:
    """While this lasts `JUMPING`, `CHANGING` and `RESTING` are tier policies."""
    kinds = {JUMPING: JumpingTier, CHANGING: ChangingTier, RESTING: RestingTier}
    places = {name: f"{kind.__module__}:{kind.__name__}" for name, kind in kinds.items()}
    with mock.patch.dict(LENGTH_POLICIES.entries, places):
        yield


@contextmanager
def resting(policy: JumpingTier) -> Iterator[None]:
    """While this lasts it chooses no drafts: what is kept of the last step, such as the batch that
    attention was planned for, is then the same each time."""
    with mock.patch.object(policy, "choose", return_value=Budget(1)):
        yield
