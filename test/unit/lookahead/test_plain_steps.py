"""A step in which the length policy lets nobody look ahead is that of plain requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from policy_steps import mask_parts
from sglang.srt.lookahead.contract import Budget, StepPlan
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.mask_planner import MaskPlanner, MTPConfig
from sglang.srt.lookahead.upcoming_step import UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import BatchRequest, NewRow, ScheduleBatch

MAX_K = 4
PROMPTS = [5, 0, 0]  # tokens that each request feeds of its prompt
CONFIDENT = {"mtp_enabled": True, "mtp_k": MAX_K, "mtp_strategy": ("conf_adapt", 0.9)}
MODES: list[dict[str, Any]] = [CONFIDENT, CONFIDENT | {"mtp_verify": True}]


class Limits(FixedLength):
    """Grants each step the next of these limits."""

    def __init__(self, *limits: int) -> None:
        super().__init__(mask_parts(MAX_K))
        self._limits = list(limits)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(self._limits.pop(0))


def plans(params: SamplingParams, limits: list[int]) -> list[StepPlan]:
    """Gives plans of steps of the same requests, without their tiers."""
    config = MTPConfig(mask_token_id=9, max_k=MAX_K, limits_unverified=True, packs_rows=True)
    planner = MaskPlanner(config, len(PROMPTS), Limits(*limits))
    rows, tokens = list(range(len(PROMPTS))), np.arange(5, dtype=np.int32)
    planner.admit([NewRow(row, 0, tokens, params, seed=0) for row in rows])
    requests = [BatchRequest(row, 20, PROMPTS[row], kv_len_before=20) for row in rows]
    batch = ScheduleBatch(requests)
    return [replace(planner.plan(batch), draft_length=0, budget=None) for _ in limits]


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
    policy = FixedLength(mask_parts(4))
    planner = MaskPlanner(config, 2, policy)
    tokens = np.arange(5, dtype=np.int32)
    for row, verify in enumerate((False, True)):
        params = SamplingParams(mtp_enabled=True, mtp_k=4, mtp_verify=verify)
        planner.admit([NewRow(row, 0, tokens, params, seed=0)])
    planner.plan(ScheduleBatch([BatchRequest(row, 20, 5, kv_len_before=0) for row in range(2)]))
    with mock.patch.object(policy, "choose", return_value=Budget(4, num_rows=7 + 2)):
        counts = planner.plan(ScheduleBatch([BatchRequest(row, 20) for row in range(2)])).counts
    assert (counts.q_lens, counts.num_read) == ([7, 7], [4, 7])
    assert counts.packed == PackedSize(7 + 2, 4 + 2 + 3)
