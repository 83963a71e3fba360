"""Time that trials of look-ahead cost, simulated by prices: what tried masks and probed drafts
lose to plain steps, whatever is right and whenever that changes.

    python -m pytest benchmark/simulations
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest

from policy_steps import MASK_K, drafted, mask_policy, mask_step, predicted
from served_rounds import rounds as measured
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import (
    CONTEXT_STEPS,
    FEED_SHARE,
    PROBE_SHARE,
    PROBE_STEPS,
    REST_AFTER,
    LoadAwareDrafts,
)
from sglang.srt.lookahead.load_aware_masks import LUCK_STEPS, TRIAL_SHARE
from sglang.srt.lookahead.matched_drafts import MatchedDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.step.price_table import PriceTable
from simulated_decode import gpu_prices
from tile_spec_rounds import prices_of

UNVERIFIED, VERIFIED = Kind(False, 5), Kind(True, 0)
KNEE = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))
PRICES = {
    "knee": KNEE,
    "flat, then a line": prices_of((1, 64, 896, 1024), (6.0, 6.0, 23.0, 23.0)),
    "graphs": replace(gpu_prices(), spread=0.004),
}
MOST = 7
DRAFTING = EmittingRequest(Kind(), 1 + MOST)


def lost_ms(
    prices: PriceTable, num_reqs: int, lag: int, steps: Iterable[tuple[int, int]]
) -> tuple[float, float, int]:
    """Plays steps, each with its prompt tokens and how many tokens of a request are right; results
    are read `lag` steps late.

    Returns:
        What is lost to plain decoding beyond TRIAL_SHARE in the worst window of steps, what may be
        lost, both in ms, and the longest limit.
    """
    policy, outcomes = mask_policy(prices, MASK_K), deque[StepOutcome]()
    limits, extras_ms = [1], [0.0]
    lost_ms = deepest_ms = 0.0  # in the window that ends here, and in the worst one
    decode_ms = prices.price_ms(mask_step(num_reqs, VERIFIED, 1).current_shape(1, is_steady=True))
    for prompts, num_right in steps:
        step = mask_step(num_reqs, VERIFIED, limits[-1], prompts)
        budget = policy.choose(step)
        plain_ms = prices.price_ms(step.current_shape(1, is_steady=True))
        limits.append(budget.limit)
        extras_ms.append(prices.price_ms(step.current_shape(budget.limit)) - plain_ms)
        taken = min(budget.limit, num_right)
        gained_ms = decode_ms * (taken - 1) - extras_ms[-1] + TRIAL_SHARE * plain_ms
        lost_ms = max(0.0, lost_ms - gained_ms)
        deepest_ms = max(deepest_ms, lost_ms)
        outcomes.append(predicted(budget, VERIFIED, [(budget.limit, taken)] * num_reqs))
        if len(outcomes) > lag:
            policy.observe(outcomes.popleft())
    luck_ms = LUCK_STEPS / num_reqs * decode_ms
    return deepest_ms, decode_ms + 2 * luck_ms + (2 + lag) * max(extras_ms), max(limits)


@pytest.mark.parametrize("lag", [0, 2, 60])
@pytest.mark.parametrize("name", ["knee", "flat, then a line", "graphs"])
def test_trials_cost_a_share_of_the_time_whatever_is_accepted_and_when_that_changes(
    name: str, lag: int
) -> None:
    """In any window of steps: gains of one phase are no credit for the next. Where steps with and
    without prompts alternate, one leaves drafts that cost much in the next."""
    luck, tried = random.Random(f"{name} {lag}"), set[int]()
    cycles = [0, 128], [0, 0, 512], [luck.choice([0, 64, 128, 512]) for _ in range(13)]
    for num_reqs in (4, 40):
        phases = [(luck.choice([0, 0, 512]), luck.choice([1, 1, 2, MASK_K])) for _ in range(10)]
        plays = [[phase for phase in phases for _ in range(60)]]
        for cycle in cycles[: 3 if lag < 60 else 0]:
            pairs = zip(itertools.cycle(cycle), itertools.cycle([1, 1, 1, 3]), strict=False)
            plays.append([*itertools.islice(pairs, 160)])
        for steps in plays:
            deepest_ms, most_ms, most_tried = lost_ms(PRICES[name], num_reqs, lag, steps)
            assert deepest_ms < most_ms, (num_reqs, steps[:13])
            tried.add(most_tried)
    assert max(tried) > 1


def test_what_failed_is_tried_again_later_and_believed_once_it_succeeds() -> None:
    policy, limits, extra_ms = mask_policy(KNEE, MASK_K), [1], 0.0
    for number in range(4500):
        step = mask_step(40, UNVERIFIED, limits[-1])
        budget = policy.choose(step)
        limits.append(budget.limit)
        if number < 3000:
            extra_ms += KNEE.price_ms(step.current_shape(budget.limit)) - 5.0
        taken = min(budget.limit, 1 if number < 3000 else MASK_K)
        policy.observe(predicted(budget, UNVERIFIED, [(budget.limit, taken)] * 40))
    tries = [place for place, limit in enumerate(limits[:3000]) if limit > 1]
    assert 3 <= len(tries) < 300
    assert max(tries) > 1500
    assert 0 < extra_ms < (TRIAL_SHARE * 3000 + 1) * 5.0
    assert min(limits[-20:]) > 1


@pytest.mark.parametrize(
    ("policy_type", "can_rest"),
    [(LoadAwareDrafts, False), (LoadAwareDrafts, True), (MatchedDrafts, False)],
)
def test_probes_cost_no_more_where_steps_with_and_without_prompts_alternate(
    policy_type: type[LoadAwareDrafts | MatchedDrafts], can_rest: bool
) -> None:
    """Prices each step with its own prompts; a head that rests is fed before it drafts again."""
    plain, fed = measured(can_rest=True), measured()
    luck, num_probes = random.Random(0), 0
    parts = PolicyParts(options=RoundOptions(MOST), num_rows=60, rounds=measured(can_rest))
    parts = replace(parts, feed_ms=plain.feed_ms if can_rest else None)
    cycles = [0, 128], [0, 0, 512], [luck.choice([0, 64, 512]) for _ in range(13)]
    for num_reqs, cycle in itertools.product((16, 60), cycles):
        policy, tiers, net_ms, is_fed = policy_type(parts), [0], 0.0, True
        none_right = mock.patch.object(policy, "lengths", return_value=[1.0] * (1 + MOST))
        for prompts in itertools.islice(itertools.cycle(cycle), 160):
            emitting, beside = Counter({DRAFTING: num_reqs}), (prompts, prompts, int(prompts > 0))
            with none_right:
                budget = policy.choose(UpcomingStep(emitting, 0, *beside, is_fed=is_fed))
            tiers.append(budget.limit - 1)
            policy.observe(drafted(0, num_reqs, [0] * num_reqs, [0] * num_reqs))
            rests = budget.rests and max(tiers[-2:]) == 0
            is_fed &= not rests
            num_rows = num_reqs * (1 + tiers[-2])
            took = (plain if rests else fed).cost(num_reqs, tiers[-1], num_rows, prompts)
            least = (plain if can_rest else fed).cost(num_reqs, 0, num_reqs, prompts)
            net_ms += (PROBE_SHARE + FEED_SHARE * can_rest) * least.rows_ms
            net_ms -= took.rows_ms - least.rows_ms
        most_ms = fed.cost(num_reqs, 1, 2 * num_reqs, 512).rows_ms
        more_ms = fed.cost(num_reqs, 0, num_reqs).rows_ms
        more_ms -= plain.cost(num_reqs, 0, num_reqs).rows_ms
        saved_ms = PROBE_STEPS * most_ms + can_rest * (CONTEXT_STEPS + REST_AFTER) * more_ms
        assert -net_ms < saved_ms, (num_reqs, cycle)
        num_probes += sum(tier > 0 for tier in tiers)
    assert num_probes > 10
