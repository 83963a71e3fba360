"""Tiers over text of the bundled model: at each place it was recorded how many drafts are right
(`record_acceptance.py`). Requests in a closed loop, with the times of an H200's steps."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from record_acceptance import NUM_NEW, RECORDED
from served_rounds import MAX_DRAFTS, rounds
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import StepCase
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from simulated_rounds import Decoding

LEAD_TOKENS, COUNTED_TOKENS = 300, 900  # of a request on average
OPTIONS = RoundOptions(MAX_DRAFTS)
TIERS = LoadAwareDrafts.tiers(OPTIONS)


class Fixed(LoadAwareDrafts):
    """Always the same tier."""

    def __init__(self, tier: int) -> None:
        self.settled = tier

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(1 + self.settled)

    def observe(self, outcome: StepOutcome) -> None:
        pass


class Recorded(Decoding):
    """Requests with recorded answers; one that ends is replaced by any other one.

    Args:
        answers: of each place of each, how many drafts are right.
    """

    def __init__(self, policy: LengthPolicy, num_reqs: int, answers: list[str]) -> None:
        super().__init__(policy, num_reqs)
        self._answers, self._choices = answers, random.Random(0)
        self._of = [self._choices.choice(answers) for _ in range(num_reqs)]
        self._places = [self._choices.randrange(NUM_NEW) for _ in range(num_reqs)]

    def right(self, row: int, tier: int, chance: float, luck: random.Random) -> int:
        right = min(tier, int(self._of[row][self._places[row]]))
        self._places[row] += 1 + right
        if self._places[row] >= NUM_NEW:
            self._of[row], self._places[row] = self._choices.choice(self._answers), 0
        return right


@cache
def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("num_reqs", [8, 32, 64, 96, 128])
@pytest.mark.parametrize("text", ["unpredictable 1008", "unpredictable 2008", "predictable 1008"])
def test_it_is_as_fast_as_the_best_fixed_number(text: str, num_reqs: int) -> None:
    prices = rounds()
    costs_ms = [prices.round_ms(StepCase(num_reqs), tier) for tier in range(1 + MAX_DRAFTS)]

    def speed(policy: LengthPolicy) -> float:
        served = Recorded(policy, num_reqs, recorded()[text])
        served.run(costs_ms, LEAD_TOKENS, lambda step: 0.0)
        return 1 / served.run(costs_ms, COUNTED_TOKENS, lambda step: 0.0).ms_per_token

    policy = LoadAwareDrafts(PolicyParts(options=OPTIONS, rounds=prices))
    # Where a draft more or less gains nothing, a short memory costs some percent.
    least = 0.93 if (text, num_reqs) == ("unpredictable 2008", 128) else 0.985
    best = max(speed(Fixed(tier)) for tier in TIERS)
    assert speed(policy) >= least * best
