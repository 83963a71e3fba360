"""Tests which requests take part in draft steps, and what their rows read and write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.draft_planner import drafts_of_requests
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.draft_steps import DraftSteps, plan_draft_steps
from sglang.srt.speculative.drafter import ExtendedStep
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import BatchRequest, ScheduleBatch
from verifying_plan import verifying_plan

NUM_DRAFTS = 3
MAX_KEPT = 1 + NUM_DRAFTS
WIDTH = 64
NUM_ROWS = 10


def batch_of(*requests: tuple[int, int, int, bool]) -> ScheduleBatch:
    """Makes a batch of what each request has: tokens with KV at most, prompt tokens fed, slots
    reserved, whether it emits. Request i has row 2 * i."""
    return ScheduleBatch(
        [
            BatchRequest(2 * i, reserved, num_prompt, emits, bound)
            for i, (bound, num_prompt, reserved, emits) in enumerate(requests)
        ]
    )


def plan_of(batch: ScheduleBatch, num_steps: int = NUM_DRAFTS) -> StepPlan:
    plan = verifying_plan(batch, NUM_DRAFTS, MAX_KEPT)
    next_drafts = drafts_of_requests(batch, plan.max_accepted, num_steps, NUM_DRAFTS)
    return replace(plan, next_drafts=next_drafts)


def planned(batch: ScheduleBatch, committed: list[int], num_steps: int = NUM_DRAFTS) -> DraftSteps:
    """Draft steps behind a step that leaves these watermarks. Token i of row r is 100 * r + i, and
    so is its slot plus one."""
    pool = ReqToTokenPool(NUM_ROWS, WIDTH, "cpu")
    state = RequestRows(pool, 1 + NUM_DRAFTS, 1000)
    numbers = torch.arange(NUM_ROWS)[:, None] * 100 + torch.arange(WIDTH)
    pool.req_to_token[:NUM_ROWS] = numbers + 1
    state.tokens[:NUM_ROWS] = numbers
    plan = plan_of(batch, num_steps)
    state.committed[batch.rows] = torch.tensor(committed)
    step = ExtendedStep(batch, plan, state, torch.tensor(batch.rows), None)
    return plan_draft_steps(step, pool, num_steps)


def test_each_step_feeds_the_position_behind_the_one_before() -> None:
    """Whatever was kept of a decode's four rows: here one and three."""
    steps = planned(batch_of((20, 5, 8, True), (10, 0, 7, True), (12, 0, 7, True)), [25, 11, 15])
    assert steps.rows.tolist() == [0, 2, 4]
    assert steps.certain_tokens.tolist() == [25, 211, 415]
    for index in range(NUM_DRAFTS):
        batch = steps.batch(index, torch.tensor([7, 8, 9]))
        assert batch.input_ids.tolist() == [7, 8, 9]
        assert batch.positions.tolist() == [25 + index, 11 + index, 15 + index]
        assert batch.slots.tolist() == [26 + index, 212 + index, 416 + index]
        assert batch.kv_lens.tolist() == [26 + index, 12 + index, 16 + index]
        assert batch.q_lens == [1, 1, 1]
        # Of a decode four rows may have been kept; the prompt's watermark is known.
        assert batch.kv_len_upper_bounds == [26 + index, 15 + index, 17 + index]
        for numbers in (batch.positions, batch.slots, batch.kv_lens):
            assert numbers.is_contiguous()
            assert numbers.data_ptr() % 16 == 0


def test_requests_without_room_or_a_token_are_left_out() -> None:
    """A chunk of a prompt, a request whose steps are plain, and one with a slot too few."""
    batch = batch_of(
        (0, 9, 9, False), (0, 9, 11, True), (20, 0, 7, True), (30, 0, 1, True), (40, 0, 6, True)
    )
    steps = planned(batch, [9, 9, 21, 31, 41])
    assert steps.rows.tolist() == [4]
    assert steps.positions.tolist() == [[21], [22], [23]]


@pytest.mark.parametrize("request_", [(0, 9, 9, False), (0, 9, 9, True), (10, 0, 1, True)], ids=str)
def test_there_are_no_steps_where_nobody_drafts(request_: tuple[int, int, int, bool]) -> None:
    assert plan_of(batch_of(request_)).next_drafts == [0]


def test_the_last_column_of_a_row_is_the_last_that_is_written() -> None:
    """The row ends where the slots of its request do."""
    steps = planned(batch_of((WIDTH - 7, 0, 7, True)), [WIDTH - 3])
    last = steps.batch(NUM_DRAFTS - 1, steps.certain_tokens)
    assert last.positions.tolist() == [WIDTH - 1]
    assert last.kv_len_upper_bounds == last.kv_lens.tolist() == [WIDTH]
    with pytest.raises(AssertionError, match="past a row's end"):
        planned(batch_of((WIDTH - 6, 0, 7, True)), [WIDTH - 4])


def test_slots_for_drafts_behind_a_prompt_are_not_fed_with_it() -> None:
    """A step of prompts alone is plain: it keeps all rows that it feeds."""
    for batch in (batch_of((0, 9, 12, True)), batch_of((0, 9, 9, False), (4, 5, 8, True))):
        plan = verifying_plan(batch, NUM_DRAFTS, MAX_KEPT)
        assert plan.counts.is_plain
        assert plan.counts.q_lens == batch.num_prompt_tokens


def test_no_request_feeds_more_rows_than_it_has_slots() -> None:
    """Say one without look-ahead, whose width is that of plain steps."""
    batch = batch_of((10, 0, 7, True), (20, 0, 1, True), (30, 0, 3, True))
    plan = verifying_plan(batch, NUM_DRAFTS, MAX_KEPT)
    assert plan.counts.q_lens == plan.counts.num_read == [4, 1, 3]
    assert verifying_plan(batch_of((20, 0, 1, True)), NUM_DRAFTS, MAX_KEPT).counts.is_plain
