"""A step that goes to another rank arrives as it was sent."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.logit_adjustments import RowAdjustments
from sglang.srt.layers.logprobs import LogprobQueries
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.token_constraint import AllowedTokens
from sglang.srt.step.worker import BatchRequest, EndedText, LogprobPlan, NewRow, ScheduleBatch
from sglang.srt.workers.step_frames import (
    AllowedFrame,
    CallFrame,
    Frame,
    StepFrame,
    decoded,
    encoded,
)

PARAMS = SamplingParams(temperature=0.5, logit_bias={"3": -1.5}, stop=["x"], sampling_seed=-(2**63))
EVERYTHING = ScheduleBatch(
    [BatchRequest(3, 5, 4, False, 7), BatchRequest(1)],
    new_rows=[
        NewRow(
            3,
            2,
            np.array([5, 6, 7], dtype=np.int32),
            PARAMS,
            2**63 - 1,
            RowAdjustments(PARAMS, [9], 2, [1, 2]),
            (4, "adapter", "salt"),
        )
    ],
    table_writes=PageTableWrites(np.arange(6).reshape(3, 2)),
    adjusts_logits=True,
    logprobs=LogprobPlan(
        [1], LogprobQueries(2, [[4]], [True]), [(0, 1)], [8], LogprobQueries(0, [[]])
    ),
    hidden_rows=[(0, 0), (1, 0)],
    ended_texts=[EndedText(1, 2, 9, (0, "", ""))],
    fixed_orders=True,
)
PLAN = StepPlan(
    counts=StepCounts([4, 1], [0, 1], [0, 1], [True, False], packed=PackedSize(8, 2)),
    max_pending=3,
    lookahead_token=319,
    draft_length=2,
    num_drafts=[0, 1],
    left_out=range(1),
    without_model=[1],
    fed_again=[3],
)


def plain(value: Any) -> Any:
    """A value whose arrays can be compared, with the types of all parts."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return type(value), str(value.dtype), value.tolist()
    if is_dataclass(value):
        return type(value), {each.name: plain(vars_of(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value


def vars_of(value: Any, name: str) -> Any:
    return object.__getattribute__(value, name)


@pytest.mark.parametrize("batch", [EVERYTHING, ScheduleBatch([BatchRequest(0)], all_greedy=True)])
def test_batch_and_plan_arrive_whole(batch: ScheduleBatch) -> None:
    before = len(encoded(StepFrame(batch, PLAN, [1])))
    assert batch.rows  # what a batch has computed of itself is not sent
    frame = encoded(StepFrame(batch, PLAN, [1]))
    assert len(frame) == before
    found = decoded(frame)
    assert isinstance(found, StepFrame)
    assert found.restricted == [1]
    assert plain(found.batch) == plain(batch)
    assert plain(found.plan) == plain(PLAN)


def test_masks_and_calls_arrive_whole() -> None:
    allowed = AllowedTokens([0, 4], torch.tensor([[1, -1], [2**31 - 1, 0]]).int(), {1: 0})
    frames: list[Frame] = [AllowedFrame(allowed), CallFrame("release", ["weights"])]
    masks, call = (decoded(encoded(frame)) for frame in frames)
    assert isinstance(masks, AllowedFrame)
    assert plain(masks.allowed) == plain(allowed)
    assert call == frames[1]


def test_arrays_that_arrive_can_be_written() -> None:
    frame = decoded(encoded(StepFrame(EVERYTHING, PLAN)))
    assert isinstance(frame, StepFrame)
    assert frame.batch.new_rows[0].tokens.flags.writeable


def test_other_objects_are_refused() -> None:
    batch = ScheduleBatch([BatchRequest(0)], constraint=object())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="no part of a frame"):
        encoded(StepFrame(batch, PLAN))
