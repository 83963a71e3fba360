"""How many drafts requests get beside others that take none, or few: what it costs, what is best,
and of whom it is learnt."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from served_rounds import DRAFT_MS, EXTEND_MS, FIRST_DRAFT_MS, READ_MS, STEP_MS, curve, parts_of
from served_rounds import rounds as measured
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.adaptive_config import AdaptiveConfig, AdaptiveSlot
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.lookahead.draft_rows import DraftRows
from sglang.srt.lookahead.ema_policy import AdaptiveController
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LEAST_GAIN, LoadAwareDrafts
from sglang.srt.lookahead.matched_drafts import MatchedDrafts, class_of
from sglang.srt.lookahead.round_options import LengthOptions, RoundOptions
from sglang.srt.lookahead.round_prices import StepCase
from sglang.srt.lookahead.upcoming_step import EmittingRequest, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams, Speculative
from sglang.srt.speculative.rounds import planner_of_rounds
from sglang.srt.step.step_sizes import PLAIN_WIDTH
from sglang.srt.step.worker import BatchRequest, HostResult, NewRow, ScheduleBatch

MOST = 7
DRAFTING = EmittingRequest(Kind(), 1 + MOST)
PLAIN = EmittingRequest(None, 1, is_adjustable=False)


def cost_ms(num_drafting: int, num_plain: int, num_drafts: int) -> float:
    """By what was measured: the target is fed all rows, the head those of requests with drafts."""
    rows = num_drafting * (1 + num_drafts)
    drafting = FIRST_DRAFT_MS + (num_drafts - 1) * DRAFT_MS if num_drafts else 0.0
    all_rows = rows + num_plain
    target = curve(STEP_MS).at(all_rows) + curve(READ_MS).at(all_rows)
    return target + curve(EXTEND_MS).at(rows) + drafting


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize(("num_drafting", "num_plain"), [(1, 0), (1, 63), (40, 30), (128, 1)])
def test_rounds_are_priced_by_the_rows_that_there_are(
    num_drafting: int, num_plain: int, num_drafts: int
) -> None:
    case = StepCase(num_drafting + num_plain, num_plain=num_plain)
    expected = cost_ms(num_drafting, num_plain, num_drafts)
    assert measured().case_ms(case, num_drafts) == pytest.approx(expected)


LENGTHS = [1.0 + sum(0.6**place for place in range(1, 1 + count)) for count in range(1 + MOST)]


def chosen(num_drafting: int, num_plain: int) -> int:
    """What the policy settles on at once, if it knows what drafts give."""
    policy = LoadAwareDrafts(PolicyParts(options=LengthOptions(MOST), rounds=measured()))
    upcoming = UpcomingStep(emitting=Counter({DRAFTING: num_drafting, PLAIN: num_plain}))
    with mock.patch.object(policy._stretches, "lengths", return_value=LENGTHS):
        return policy.choose(upcoming).settled


def test_the_best_number_counts_what_the_others_cost_and_gain() -> None:
    seen = set()
    for num_drafting in (1, 8, 30, 60, 100, 150, 250):
        for num_plain in (0, 1, 20, 100, 300):
            costs = [cost_ms(num_drafting, num_plain, tier) for tier in range(1 + MOST)]
            rates = {
                tier: (num_drafting * LENGTHS[tier] + num_plain) / costs[tier]
                for tier in LoadAwareDrafts.tiers(LengthOptions(MOST))
            }
            found = chosen(num_drafting, num_plain)
            best = max(rates, key=lambda tier: (rates[tier], -tier))
            pays = rates[best] > rates[0] * (1 + LEAST_GAIN)
            assert found == (best if pays else 0)
            seen.add((num_drafting, found))
    assert any(len({tier for count, tier in seen if count == each}) > 1 for each in (30, 60, 100))


@pytest.mark.parametrize("num_plain", [0, 6])
def test_drafts_that_were_never_right_are_tried_again(num_plain: int) -> None:
    policy = LoadAwareDrafts(PolicyParts(options=LengthOptions(MOST), rounds=measured()))
    upcoming = UpcomingStep(emitting=Counter({DRAFTING: 2, PLAIN: num_plain}))
    with mock.patch.object(policy._stretches, "lengths", return_value=[1.0] * (1 + MOST)):
        budgets = [policy.choose(upcoming) for _ in range(2000)]
    assert {budget.settled for budget in budgets} == {0}
    assert sum(budget.limit > 1 for budget in budgets) > 5


def test_of_n_grams_too() -> None:
    options, prices = LengthOptions(MOST), measured()
    policy = MatchedDrafts(PolicyParts(options=options, rounds=prices))
    sure = EmittingRequest(Kind(match=class_of(9)), 1 + MOST)
    alone = policy._lengths(UpcomingStep(emitting=Counter({sure: 2})))
    beside = policy._lengths(UpcomingStep(emitting=Counter({sure: 2, PLAIN: 6})))
    assert beside == pytest.approx([3 + length for length in alone])


def test_the_moving_average_is_of_requests_with_all_drafts() -> None:
    slot = AdaptiveSlot(
        min_batch_size=1,
        candidate_steps=(1, 3),
        up_hysteresis=0.0,
        down_hysteresis=0.0,
        ceiling_coeff=0.0,
        ema_alpha=1.0,
        warmup_batches=0,
        update_interval=1,
    )
    options = LengthOptions(3, 3, AdaptiveConfig(slots=(slot,)))
    policy = AdaptiveController(PolicyParts(options=options))
    plan = cast(StepPlan, SimpleNamespace(tier=3, num_drafted_for=4))
    outcome: Any = SimpleNamespace(plan=plan, num_tried=[4, 1, 2, 4], num_accepted=[3, 1, 1, 4])
    policy.observe(outcome)
    assert policy.params.state_for_batch(4).ema == 2.5
    nobody: Any = SimpleNamespace(plan=plan, num_tried=[1, 1, 2, 1], num_accepted=[1, 1, 1, 1])
    policy.observe(nobody)
    assert policy.params.state_for_batch(4).num_rounds == 1


def params_of(**choice: Any) -> SamplingParams:
    return SamplingParams(speculative=Speculative(**choice))


def test_a_policy_is_asked_for_those_who_take_drafts() -> None:
    planner = planner_of_rounds(RoundOptions(3), parts_of(4), None)
    rows = cast(DraftRows, planner.rows)
    choices = [params_of(), params_of(enabled=False), params_of(max_drafts=1), params_of()]
    assert rows.step_width(choices[1]) == PLAIN_WIDTH
    widths = {rows.step_width(choices[place]) for place in (0, 2)}
    assert len(widths) == 1
    assert PLAIN_WIDTH not in widths
    tokens: Any = [1, 2]
    planner.admit([NewRow(row, 0, tokens, params, 0) for row, params in enumerate(choices)])
    requests = [
        BatchRequest(row, rows.step_width(params).decode_rows) for row, params in enumerate(choices)
    ]
    with mock.patch.object(planner.policy, "choose", wraps=planner.policy.choose) as asked:
        plan = planner.plan(ScheduleBatch(requests))
        [upcoming] = asked.call_args.args
        assert (upcoming.num_reqs, upcoming.num_plain, upcoming.longest) == (4, 1, 4)
        assert list(plan.next_drafts) == [3, 0, 1, 3]
        assert list(plan.left_out) == [1]
        plan = planner.plan(ScheduleBatch(requests))
        assert plan.counts.q_lens == [4, 1, 2, 4]
        asked.reset_mock()
        alone = planner.plan(ScheduleBatch(requests[1:2]))
        assert not asked.called
    assert alone.rests
    assert alone.is_plain
    result = HostResult([[1]], [1], [1])
    outcome = rows.outcome(StepRecord(rows=[1], plan=alone), result)
    assert list(outcome.num_tried) == [1]
