"""Rounds as a planner of drafts plans them: who gets drafts, and when a head rests."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from served_rounds import MAX_DRAFTS, Load, ServedRounds, SomeLeftOut, batch_of, parts_of
from sglang.srt.lookahead import load_aware_drafts
from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.lookahead.load_aware_drafts import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.sampling.sampling_params import SamplingParams, Speculative
from sglang.srt.speculative.rounds import planner_of_rounds
from sglang.srt.step.step_sizes import PLAIN_WIDTH
from sglang.srt.step.worker import BatchRequest, HostResult, NewRow, ScheduleBatch
from tile_spec_decode import Text

SURE = Text(0.75, 0.96, 0.45)
NEVER = Text(0.0, 0.9, 0.02)  # no draft is right, and the head says so
WRONG = Text(0.0, 0.02, 0.02)  # nor does it ever think so
BY_LOAD = RoundOptions(MAX_DRAFTS, "load_aware")
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


def test_a_head_rests_and_looks_again_where_answers_are_shorter_than_what_it_waits() -> None:
    """Each prompt is a new request's, and no head is fed on behalf of probes that never come."""
    served = ServedRounds(Load(1, 64, REST_AFTER - 4), WRONG, BY_LOAD, can_rest=True)
    served.rate(1, 300)
    assert served.num_rests > 150
    before = served.tiers.copy()
    served.change_text(SURE)
    served.rate(1, 300)
    assert sum(count for tier, count in (served.tiers - before).items() if tier) > 100


@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
@pytest.mark.parametrize("can_rest", [False, True])
def test_a_step_of_a_prompts_first_chunk_alone_gives_nobody_drafts(
    options: RoundOptions, can_rest: bool
) -> None:
    planner = ServedRounds(Load(2), SURE, options, can_rest).planner
    for _ in range(3):
        plan = planner.plan(batch_of([16], emits=False))
        assert list(plan.next_drafts) == [0]
    given = [max(planner.plan(batch_of([prompt])).next_drafts) for prompt in (7, 0)]
    assert max(given) > 0


def test_a_head_that_rested_is_fed_the_chunks_of_a_prompt_that_is_alone() -> None:
    """Feeds whole prompts: what was left out of one would be missing to all that begin like it."""
    served = ServedRounds(Load(128), NEVER, BY_LOAD, can_rest=True)
    served.rate(1, 100)
    planner, is_idle = served.planner, [0] * 128
    while not planner.plan(batch_of(is_idle)).rests:
        pass
    plans = [planner.plan(batch_of([16], emits=False)) for _ in range(3)]
    assert [plan.rests for plan in plans] == [False] * 3
    assert planner.plan(batch_of(is_idle)).rests


@pytest.mark.parametrize("is_fed", [False, True])
def test_requests_that_were_fed_whole_are_drafted_for_at_once(is_fed: bool) -> None:
    """Others when the head has been fed some of their tokens."""
    rest = RestRule()
    with mock.patch.object(load_aware_drafts, "RestRule", return_value=rest):
        served = ServedRounds(Load(128), (NEVER, SURE), BY_LOAD, can_rest=True)
    served.rate(1, 400)
    for _ in range(REST_AFTER):
        rest.step(False, is_fed=False)
    assert rest.rests
    planner = served.planner
    with mock.patch.object(SomeLeftOut, "lacks_tokens", return_value=not is_fed):
        given = [max(planner.plan(batch_of([0])).next_drafts) for _ in range(CONTEXT_STEPS + 1)]
    assert given[-1] > 0
    assert (given[0] > 0) == is_fed
    assert (max(given[:-1]) > 0) == is_fed


def params_of(**choice: Any) -> SamplingParams:
    return SamplingParams(speculative=Speculative(**choice))


def test_a_policy_is_asked_for_those_who_take_drafts() -> None:
    planner = planner_of_rounds(RoundOptions(3), parts_of(4), None)
    choices = [params_of(), params_of(enabled=False), params_of(max_drafts=1), params_of()]
    assert planner.step_width(choices[1]) == PLAIN_WIDTH
    assert planner.step_width(choices[0]) == planner.step_width(choices[2]) != PLAIN_WIDTH
    tokens: Any = [1, 2]
    planner.admit([NewRow(row, 0, tokens, params, 0) for row, params in enumerate(choices)])
    widths = [planner.step_width(params).decode_rows for params in choices]
    requests = [BatchRequest(row, width) for row, width in enumerate(widths)]
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
    assert alone.counts.is_plain
    result = HostResult([[1]], [1], [1])
    with mock.patch.object(planner.policy, "observe") as told:
        planner.observe(StepRecord(rows=[1], plan=alone), result)
    assert list(told.call_args.args[0].num_tried) == [1]
