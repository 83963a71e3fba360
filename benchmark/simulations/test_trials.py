"""Time that trials of look-ahead cost, simulated by prices: what tried masks and probed drafts
lose to plain steps, whatever is right and whenever that changes.

    python -m pytest benchmark/simulations
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
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
from sglang.srt.lookahead.matched_drafts import MatchedDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.step.price_table import PromptChunk
from tile_spec_rounds import prices_of

UNVERIFIED = Kind(False, 5)
KNEE = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))
MOST = 7
DRAFTING = EmittingRequest(Kind(), 1 + MOST)


@pytest.mark.parametrize("unread", [0, 2, 60])
def test_what_failed_is_tried_again_later_and_believed_once_it_succeeds(unread: int) -> None:
    """Results are read so many steps late. What trials lose is bounded from the first step on."""
    policy, limits, extra_ms = mask_policy(KNEE, MASK_K), [1], 0.0
    results = deque[StepOutcome]()
    for number in range(4500):
        step = mask_step(40, UNVERIFIED, limits[-1])
        budget = policy.choose(step)
        limits.append(budget.limit)
        if number < 3000:
            extra_ms += KNEE.price_ms(step.current_shape(budget.limit)) - 5.0
            assert extra_ms < (PROBE_SHARE * (1 + number) + PROBE_STEPS) * 5.0
        taken = min(budget.limit, 1 if number < 3000 else MASK_K)
        results.append(predicted(budget, UNVERIFIED, [(budget.limit, taken)] * 40))
        if len(results) > unread:
            policy.observe(results.popleft())
    tries = [place for place, limit in enumerate(limits[:3000]) if limit > 1]
    assert 3 <= len(tries) < 300
    assert max(tries) > 1500
    assert extra_ms > 0
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
    parts = PolicyParts(options=RoundOptions(MOST), rounds=measured(can_rest))
    parts = replace(parts, feed_ms=plain.feed_ms if can_rest else None)
    cycles = [0, 128], [0, 0, 512], [luck.choice([0, 64, 512]) for _ in range(13)]
    for num_reqs, cycle in itertools.product((16, 60), cycles):
        policy, tiers, net_ms, is_fed = policy_type(parts), [0], 0.0, True
        none_right = mock.patch.object(policy, "lengths", return_value=[1.0] * (1 + MOST))
        for prompts in itertools.islice(itertools.cycle(cycle), 160):
            emitting, chunks = Counter({DRAFTING: num_reqs}), (PromptChunk(0, prompts),)
            with none_right:
                budget = policy.choose(
                    UpcomingStep(emitting, 0, int(prompts > 0), chunks, is_fed=is_fed)
                )
            tiers.append(budget.limit - 1)
            policy.observe(drafted(0, num_reqs, [0] * num_reqs, [0] * num_reqs))
            rests = budget.rests and max(tiers[-2:]) == 0
            is_fed &= not rests
            num_rows = num_reqs * (1 + tiers[-2])
            took = (plain if rests else fed).cost(num_reqs, tiers[-1], num_rows, prompts, 0)
            least = (plain if can_rest else fed).cost(num_reqs, 0, num_reqs, prompts, 0)
            net_ms += (PROBE_SHARE + FEED_SHARE * can_rest) * least.rows_ms
            net_ms -= took.rows_ms - least.rows_ms
        most_ms = fed.cost(num_reqs, 1, 2 * num_reqs, 512, 0).rows_ms
        more_ms = fed.cost(num_reqs, 0, num_reqs, 0, 0).rows_ms
        more_ms -= plain.cost(num_reqs, 0, num_reqs, 0, 0).rows_ms
        saved_ms = PROBE_STEPS * most_ms + can_rest * (CONTEXT_STEPS + REST_AFTER) * more_ms
        assert -net_ms < saved_ms, (num_reqs, cycle)
        num_probes += sum(tier > 0 for tier in tiers)
    assert num_probes > 10
