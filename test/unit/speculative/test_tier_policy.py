"""How many drafts are verified under the load at hand."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest

from policy_steps import drafting_step
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead.adaptive_config import parse_adaptive_config
from sglang.srt.lookahead.length_policy import FixedLength, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import (
    LoadAwareDrafts,
    best_tier,
    hopeful_tiers,
)
from sglang.srt.lookahead.round_options import LengthOptions
from sglang.srt.lookahead.round_prices import MeasuredRounds, StepCases
from sglang.srt.lookahead.stretches import Stretches
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.price_table import Curve, DraftPrices, PriceTable, StepShape
from simulated_rounds import H200_MS, Decoding, ListedRounds


def load_aware(num_reqs: int, costs_ms: tuple[float, ...]) -> Decoding:
    parts = PolicyParts(
        options=LengthOptions(len(costs_ms) - 1),
        num_rows=num_reqs,
        rounds=ListedRounds({num_reqs: costs_ms}),
    )
    return Decoding(LoadAwareDrafts(parts), num_reqs)


def random_costs(chooser: random.Random) -> tuple[float, ...]:
    """A staircase that falls in places; every round with drafts costs more than a plain step."""
    return (5.0, *(5.0 + chooser.choice([0.2, 1.0, 3.0, 9.0]) * chooser.random() for _ in range(5)))


def test_the_best_tier_is_that_of_a_search() -> None:
    chooser = random.Random(0)
    for _ in range(500):
        chances = [chooser.random() for _ in range(5)]
        lengths = [1 + sum(itertools.accumulate(chances[:n], float.__mul__)) for n in range(6)]
        costs = dict(enumerate(random_costs(chooser)))
        best = best_tier(lengths, costs)
        rates = [lengths[tier] / cost for tier, cost in costs.items()]
        assert rates[best] == max(rates)
        gain = chooser.random() / 2
        least = rates[0] * (1 + gain)
        assert best_tier(lengths, costs, gain) == (best if rates[best] > least else 0)
        hopeful = hopeful_tiers(lengths, costs, best, 0.0)
        chance = lengths[best] - lengths[best - 1] if best else 1.0
        assert hopeful == [
            tier
            for tier in range(best + 1, 6)
            if (lengths[best] + chance * (tier - best)) / costs[tier] > rates[best]
        ]


def test_of_equal_tiers_the_one_of_fewer_rows_is_taken() -> None:
    assert best_tier([1.0, 1.5, 2.0], {0: 2.0, 1: 3.0, 2: 4.0}) == 0
    assert best_tier([1.0, 2.0, 3.0], {0: 4.0, 1: 4.0, 2: 6.0}) == 1


def test_equal_histories_get_equal_answers() -> None:
    costs = H200_MS[8]
    runs = [load_aware(8, costs).run(costs, 300, lambda step: 0.5) for _ in range(2)]
    assert runs[0] == runs[1]


def test_it_looks_again_soon_after_its_best_tier_came_and_went() -> None:
    """Steps that feed the head, since drafts paid a moment ago, are not owed for without end."""
    prices, feed_ms = ListedRounds({1: (4.0, 4.3)}), 0.2
    policy = LoadAwareDrafts(
        PolicyParts(options=LengthOptions(1), rounds=prices, feed_ms=lambda cases: feed_ms)
    )
    found, step = {}, drafting_step(1)
    for num_steps in (40, 4000):
        for number in range(num_steps):
            pays = number % 8 == 0
            with mock.patch.object(Stretches, "lengths", return_value=[1.0, 1.0 + pays]):
                policy.choose(step)
        with mock.patch.object(Stretches, "lengths", return_value=[1.0, 1.0]):
            found[num_steps] = next(n for n in itertools.count() if policy.choose(step).limit > 1)
    assert found[4000] <= found[40] + 300


def test_of_tiers_that_a_batch_may_have_it_chooses_those_alone() -> None:
    config = parse_adaptive_config(
        b'{"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1]}}', "here"
    )
    options = LengthOptions(3, 3, config)
    assert LoadAwareDrafts.tiers(options) == (0, 1, 3)
    for num_reqs, allowed in ((1, {0, 1, 3}), (8, {0, 1}), (32, {0, 1})):
        prices = ListedRounds({num_reqs: H200_MS[num_reqs]})
        parts = PolicyParts(options=options, num_rows=num_reqs, rounds=prices)
        served = Decoding(LoadAwareDrafts(parts), num_reqs)
        found = served.run(H200_MS[num_reqs], 300, lambda step: 0.9)
        assert set(found.tiers) <= allowed
        assert found.tiers[max(allowed)] > found.tiers.total() / 2


@pytest.mark.long_matrix
@pytest.mark.parametrize("max_drafts", [1, 2, 3, 5, 6, 8, 9, 31, 63])
def test_tiers_reach_from_none_to_all(max_drafts: int) -> None:
    options = LengthOptions(max_drafts)
    tiers = LoadAwareDrafts.tiers(options)
    assert list(tiers) == sorted({*tiers})
    assert tiers[0] == 0
    assert tiers[-1] == max_drafts
    assert len(tiers) <= 10, "each has graphs of its own"
    if max_drafts <= 5:
        assert tiers == tuple(range(max_drafts + 1))
    assert FixedLength.tiers(options) == (max_drafts,)
    assert FixedLength(PolicyParts(options=options)).choose(drafting_step(1, max_drafts)).limit == (
        1 + max_drafts
    )


def test_a_round_costs_the_step_the_pass_over_its_rows_and_the_draft_steps() -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, 4, 0)
    target = PriceTable(
        find=keys.find_shape,
        graphs_ms={key: 10.0 + key.num_tokens for key in keys.all},
        eager=Curve((1,), (1e9,)),
        head=Curve((1, 100), (1.0, 100.0)),
        kv_ms=0.5,
        row_kv_ms=0.25,
    )
    extend = PriceTable(
        find=lambda *rows: None,
        graphs_ms={},
        eager=Curve((1, 100), (0.1, 10.0)),
        head=Curve((1, 100), (3.0, 300.0)),
        kv_ms=0.02,
        row_kv_ms=0.01,
    )
    passes = {1: Curve((1, 8), (7.0, 7.0)), 2: Curve((1, 8), (14.0, 14.0))}
    prices = MeasuredRounds(target, DraftPrices(extend, passes))
    for num_reqs, num_drafts, kv_tokens in itertools.product((1, 3, 8), range(4), (0, 40)):
        rows = num_reqs * (1 + num_drafts)
        shape = StepShape(
            num_reqs, 1 + num_drafts, rows, rows, kv_tokens, (1 + num_drafts) * kv_tokens
        )
        cost = target.price_ms(shape) + 0.1 * rows
        cost += kv_tokens * (0.02 + 0.01 * (1 + num_drafts))
        if num_drafts:
            cost += 3.0 * num_reqs + (num_drafts - 1) * (7.0 + 0.03 * kv_tokens)
        found = prices.round_ms(StepCases(num_reqs, kv_tokens), num_drafts)
        assert found == pytest.approx(cost)


def test_steps_of_fewer_rows_than_the_widest_find_the_smallest_graph_that_has_room() -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, 128, 4, 1024)
    for num_reqs, num_drafts in itertools.product((1, 5, 32, 100, 128), range(4)):
        found = keys.find([1 + num_drafts] * num_reqs)
        assert found is not None
        rows = num_reqs * (1 + num_drafts)
        reqs = min(
            key.num_reqs for key in keys.all if key.tag == found.tag and key.num_reqs >= num_reqs
        )
        same = [key for key in keys.all if (key.tag, key.num_reqs) == (found.tag, reqs)]
        assert found.num_tokens == min(key.num_tokens for key in same if key.num_tokens >= rows)
        assert (found.tag == "decode") == (num_drafts == 0)
