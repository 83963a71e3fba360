"""Tokens that a drafter's model was not fed, since it was left out of steps (`StepPlan.rests`):
what of them is on the device.

It has no KV of them, so of each row it sees those after the last one alone
(`MHATokenToKVPool.kv_starts`). Its pool marks their slots (`left_out`): a cached prefix may have
some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch


class LeftOutTokens:
    """Keeps `kv_starts` and `left_out` of a pool.

    Args:
        pool: of the drafter's model, with `kv_starts`.
    """

    def __init__(self, table: ReqToTokenPool, pool: MHATokenToKVPool, state: RequestRows) -> None:
        assert pool.kv_starts is not None, "The model is fed every token."
        assert pool.left_out is not None, "The model is fed every token."
        self._starts = pool.kv_starts
        self._marks = pool.left_out[:, 0]  # [slots]
        self._table = table.req_to_token
        self._state = state
        self._any_marked = False

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        """Before a step is launched. From its first row on, a request whose last tokens were left
        out is fed all again."""
        if self._any_marked and batch.new_rows:
            # Not `self._starts[rows] = 0`, for which torch 2.11 waits for the device.
            self._starts.index_fill_(0, self._on_device([new.row for new in batch.new_rows]), 0)
        if plan.fed_again:
            rows = self._on_device(plan.fed_again)
            self._starts[rows] = self._state.committed[rows]

    def leave_out(self, slots: torch.Tensor) -> None:
        """Marks the slots [T] int64 that a step has fed to the target alone."""
        self._any_marked = True
        self._marks.index_fill_(0, slots, True)

    def feed(self, step: ComputedStep) -> None:
        """Takes the marks from the slots of a step whose tokens the model is about to be fed, in
        graphs of steps too. New requests see their cached prefix after its last mark. Waits for
        nothing on the device."""
        self._marks.index_fill_(0, step.inputs.slots, False)
        if not self._any_marked:
            return
        for new in step.batch.new_rows:
            if new.num_committed:
                slots = self._table[new.row, : new.num_committed].to(torch.int64)
                ends = torch.arange(1, new.num_committed + 1, device=slots.device)
                self._starts[new.row] = (ends * self._marks[slots]).amax()

    def _on_device(self, rows: Sequence[int]) -> torch.Tensor:
        return to_device(rows, self._starts.device, torch.int64)
