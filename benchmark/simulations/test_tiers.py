"""Speed of tiers of drafts that are chosen by load, simulated, beside plain steps and the best.

python -m pytest benchmark/simulations
"""

from __future__ import annotations

import random

import pytest

from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import (
    PROBE_SHARE,
    PROBE_STEPS,
    LoadAwareDrafts,
)
from sglang.srt.lookahead.round_options import RoundOptions
from simulated_rounds import H200_MS, Decoding, ListedRounds, best_ms_per_token

# Of the best tier's time per token, at most, on text whose drafts are right at random: the fewer
# requests there are, the fewer drafts are remembered.
MOST = {1: 1.08, 8: 1.04}
CHANCES = [0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


def load_aware(num_reqs: int, costs_ms: tuple[float, ...]) -> Decoding:
    parts = PolicyParts(
        options=RoundOptions(len(costs_ms) - 1),
        rounds=ListedRounds({num_reqs: costs_ms}),
    )
    return Decoding(LoadAwareDrafts(parts), num_reqs)


def random_costs(chooser: random.Random) -> tuple[float, ...]:
    """A staircase that falls in places; every round with drafts costs more than a plain step."""
    return (5.0, *(5.0 + chooser.choice([0.2, 1.0, 3.0, 9.0]) * chooser.random() for _ in range(5)))


@pytest.mark.parametrize("num_reqs", H200_MS)
def test_on_an_h200_it_is_never_slower_than_plain_and_nearly_as_fast_as_the_best_tier(
    num_reqs: int,
) -> None:
    """A lone request tries few drafts where most are wrong, and so learns slowly."""
    costs, num_tokens = H200_MS[num_reqs], 6000 if num_reqs == 1 else 1500
    most = 1.04 if num_reqs == 1 else 1.03
    for chance in CHANCES:
        served = load_aware(num_reqs, costs)
        found = served.run(costs, num_tokens, lambda step, chance=chance: chance)
        assert found.ms_per_token <= 1.01 * costs[0], (chance, found)
        assert found.ms_per_token <= most * best_ms_per_token(costs, chance), (chance, found)


def test_under_prices_of_any_kind_it_is_not_slower_than_plain() -> None:
    chooser = random.Random(1)
    for _ in range(30):
        costs, num_reqs, chance = random_costs(chooser), chooser.choice([4, 32]), chooser.random()
        served = load_aware(num_reqs, costs)
        found = served.run(costs, 1500, lambda step, chance=chance: chance)
        assert found.ms_per_token <= 1.01 * costs[0], (costs, num_reqs, chance, found)


@pytest.mark.parametrize("num_reqs", H200_MS)
def test_if_nothing_is_ever_right_probes_cost_what_they_may(num_reqs: int) -> None:
    """Steps that believed the prior are few: what was read of the first ones tells."""
    costs, num_steps = H200_MS[num_reqs], 4000
    found = load_aware(num_reqs, costs).run(costs, num_steps, lambda step: 0.0)
    lost = found.ms_per_token / costs[0] - 1
    believed = 12 * (costs[3] / costs[0] - 1) if num_reqs == 1 else 3 * (costs[3] / costs[0] - 1)
    assert lost <= PROBE_SHARE + (PROBE_STEPS + believed) / num_steps
    assert sum(count for tier, count in found.tiers.items() if tier) > 5, "it stopped to look"


@pytest.mark.parametrize(("num_reqs", "num_steps"), [(1, 1000), (8, 300), (128, 400)])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0), (0.4, 0.9)])
def test_it_follows_text_that_changes(
    num_reqs: int, num_steps: int, before: float, after: float
) -> None:
    """After so many steps nearly all have the tier that is best now."""
    costs = H200_MS[num_reqs]
    served = load_aware(num_reqs, costs)
    served.run(costs, 1000, lambda step: before)
    served.run(costs, num_steps, lambda step: after, seed=1)
    found = served.run(costs, 1000, lambda step: after, seed=2)
    assert found.ms_per_token <= MOST.get(num_reqs, 1.02) * best_ms_per_token(costs, after), found


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(1, 200), (8, 60), (32, 60), (128, 20)])
def test_drafts_that_are_suddenly_wrong_are_noticed_at_once(num_reqs: int, num_tokens: int) -> None:
    """However long they were right: after so many tokens of each request."""
    costs = H200_MS[num_reqs]
    served = load_aware(num_reqs, costs)
    served.run(costs, 2000, lambda step: 0.95)
    served.run(costs, num_tokens, lambda step: 0.1, seed=1)
    found = served.run(costs, 100, lambda step: 0.1, seed=2)
    assert found.ms_per_token <= MOST.get(num_reqs, 1.02) * best_ms_per_token(costs, 0.1), found
