"""Steps as planners plan them: who gets drafts, when a head rests, and steps without look-ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from policy_steps import mask_parts
from served_rounds import MAX_DRAFTS, Load, ServedRounds, SomeLeftOut, batch_of, parts_of
from sglang.srt.lookahead import load_aware_drafts
from sglang.srt.lookahead.contract import Budget, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.load_aware_drafts import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.lookahead.mask_planner import MaskPlanner, MTPConfig
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices
from sglang.srt.sampling.sampling_params import SamplingParams, Speculative
from sglang.srt.speculative.rounds import planner_of_rounds
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.step_sizes import PLAIN_WIDTH
from sglang.srt.step.worker import BatchRequest, HostResult, NewRow, ScheduleBatch
from tile_spec_decode import Text
from tile_spec_rounds import FREE_DRAFTS, FREE_PASS, FREE_ROWS

TOKENS = np.arange(5, dtype=np.int32)
SURE = Text(0.75, 0.96, 0.45)
NEVER = Text(0.0, 0.9, 0.02)  # no draft is right, and the head says so
BY_LOAD = RoundOptions(MAX_DRAFTS, "load_aware")
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


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
        rest.step(False)
    assert rest.rests
    planner = served.planner
    with mock.patch.object(SomeLeftOut, "lacks_tokens", return_value=not is_fed):
        given = [max(planner.plan(batch_of([0])).next_drafts) for _ in range(CONTEXT_STEPS + 1)]
    assert given[-1] > 0
    assert (given[0] > 0) == is_fed
    assert (max(given[:-1]) > 0) == is_fed


def test_a_policy_is_asked_for_those_who_take_drafts() -> None:
    planner = planner_of_rounds(RoundOptions(3), parts_of(4), None)
    wishes = Speculative(), Speculative(enabled=False), Speculative(max_drafts=1), Speculative()
    choices = [SamplingParams(speculative=each) for each in wishes]
    assert planner.step_width(choices[1]) == PLAIN_WIDTH
    assert planner.step_width(choices[0]) == planner.step_width(choices[2]) != PLAIN_WIDTH
    planner.admit([NewRow(row, 0, TOKENS, params, 0) for row, params in enumerate(choices)])
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


@pytest.mark.parametrize("tree", [None, TreeShape(topk=4, depth=3, num_drafts=10)], ids=str)
def test_where_rows_cost_nothing_steps_are_those_without_tile_spec(tree: TreeShape | None) -> None:
    """And nothing more is copied from the device."""
    plans = []
    for cache in (None, Path("unused")):
        head = replace(FREE_DRAFTS, passes={tree or 2: FREE_PASS})
        options = RoundOptions(3, tree=tree, tile_spec_cache=cache)
        prices = MeasuredRoundPrices(FREE_ROWS, head, tree=tree)
        planner = planner_of_rounds(options, parts_of(4), prices)
        planner.admit([NewRow(row, 0, TOKENS, SamplingParams(), 0) for row in range(4)])
        requests = [BatchRequest(row, 40) for row in range(4)]
        plans.append([planner.plan(ScheduleBatch(requests)) for _ in range(3)])
    assert plans[0] == plans[1]
    assert plans[1][2].max_pending > 3
    assert not any(plan.wants_scores or plan.wants_paths for plan in plans[1])


# ---------------------------------------------------------------- masks

MAX_K = 4
PROMPTS = [5, 0, 0]  # tokens that each request feeds of its prompt
CONFIDENT = {"mtp_enabled": True, "mtp_k": MAX_K, "mtp_strategy": ("conf_adapt", 0.9)}
MODES: list[dict[str, Any]] = [CONFIDENT, CONFIDENT | {"mtp_verify": True}]


def plans(params: SamplingParams, limits: list[int]) -> list[StepPlan]:
    """Gives plans of steps of the same requests, each with the next of these limits, without their
    tiers."""
    config = MTPConfig(mask_token_id=9, max_k=MAX_K, limits_unverified=True, packs_rows=True)
    policy = FixedLength(mask_parts(MAX_K))
    planner = MaskPlanner(config, len(PROMPTS), policy)
    planner.admit([NewRow(row, 0, TOKENS, params, seed=0) for row in range(len(PROMPTS))])
    requests = [BatchRequest(row, 20, fed, kv_len_before=20) for row, fed in enumerate(PROMPTS)]
    with mock.patch.object(policy, "choose", side_effect=map(Budget, limits)):
        found = [planner.plan(ScheduleBatch(requests)) for _ in limits]
    return [replace(plan, draft_length=0) for plan in found]


@pytest.mark.parametrize("mode", MODES, ids=["unverified", "verified"])
def test_a_step_without_look_ahead_is_planned_as_that_of_plain_requests(
    mode: dict[str, Any],
) -> None:
    """Once nothing is pending of a step before it, which looked ahead."""
    [plain] = plans(SamplingParams(temperature=0.0), [1])
    first, after, last = plans(SamplingParams(temperature=0.0, **mode), [2, 1, 1])
    assert first.wants_probs
    assert after.counts.q_lens == [5, 2, 2]
    assert last == plain


def test_rows_that_unverified_requests_may_leave_are_read_by_others() -> None:
    """Unverified requests may have fewer pending tokens than the host expects. The device gives
    their rows to verified ones, of which it reads all."""
    config = MTPConfig(mask_token_id=9, max_k=4, packs_rows=True)
    policy = FixedLength(mask_parts(MAX_K))
    planner = MaskPlanner(config, 2, policy)
    for row, verify in enumerate((False, True)):
        params = SamplingParams(mtp_enabled=True, mtp_k=4, mtp_verify=verify)
        planner.admit([NewRow(row, 0, TOKENS, params, seed=0)])
    planner.plan(ScheduleBatch([BatchRequest(row, 20, 5, kv_len_before=0) for row in range(2)]))
    with mock.patch.object(policy, "choose", return_value=Budget(4, num_rows=7 + 2)):
        counts = planner.plan(ScheduleBatch([BatchRequest(row, 20) for row in range(2)])).counts
    assert (counts.q_lens, counts.num_read) == ([7, 7], [4, 7])
    assert counts.packed == PackedSize(7 + 2, 4 + 2 + 3)
