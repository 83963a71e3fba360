"""Tokens that a drafter's models are not fed (`StepPlan.left_out`): what of them is on the device.

The models have no KV of them, so of each row they see those after the last one alone
(`MHATokenToKVPool.kv_starts`). Their pools mark the slots of tokens that they were fed (`is_fed`):
a cached prefix may have others.
"""

from __future__ import annotations

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.step_parts import others, part_of, rows_of_places
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch


class LeftOutTokens:
    """Says what a drafter is fed of a step, and keeps `kv_starts` and `is_fed` of its pools. Those
    without `kv_starts` are of models that are fed all."""

    def __init__(self, memory: KVMemory, state: RequestRows) -> None:
        self._table = memory.table.req_to_token
        self._state = state
        self._pools, marks = memory.pools, [(pool.kv_starts, pool.is_fed) for pool in memory.pools]
        # Of each pool `kv_starts`, and `is_fed` as [slots] bool.
        self._marks = [(kv, fed[:, 0]) for kv, fed in marks if kv is not None and fed is not None]
        self._any_fed = self._any_left_out = False

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        """Gets `kv_starts` ready before a step is launched: new requests see all KV, and those of
        `StepPlan.fed_again` the KV of what they are fed from now on."""
        self._any_fed |= not plan.rests
        if self._any_left_out and batch.new_rows:
            new = to_device([each.row for each in batch.new_rows], self._table.device, torch.int64)
            for starts, _ in self._marks:  # not `starts[new] = 0`, for which torch 2.11 waits
                starts.index_fill_(0, new, 0)
        if plan.fed_again:
            rows = to_device(plan.fed_again, self._table.device, torch.int64)
            for starts, _ in self._marks:
                starts[rows] = self._state.committed[rows]

    def fed(self, step: ComputedStep) -> ComputedStep | None:
        """Returns the part of a step that the drafter is fed; None: nothing. Graphs capture it too,
        and it waits for nothing on the device."""
        plan = step.plan
        if self._any_fed or not plan.rests:  # else no slot has a mark
            self._mark(step, {*plan.left_out, *plan.without_model})
        if not self._any_left_out and self._marks and (plan.left_out or plan.without_model):
            self._any_left_out = True
            for pool in self._pools:
                pool.hides_kv = pool.kv_starts is not None
        if plan.rests:
            return None
        if plan.left_out:
            step = part_of(step, others(step.batch.rows, plan.left_out))
        if self._any_left_out:
            self._hide_prefixes(step)
        return step

    def _mark(self, step: ComputedStep, unfed: set[int]) -> None:
        """Marks the slots of a step, but for the requests at places `unfed`, whose marks go."""
        slots, is_mixed = step.inputs.slots, 0 < len(unfed) < len(step.batch.rows)
        is_unfed = rows_of_places(step, unfed) if is_mixed and self._marks else None
        for _, is_fed in self._marks:
            if is_unfed is None:
                is_fed.index_fill_(0, slots, not unfed)
            else:
                is_fed.index_copy_(0, slots, ~is_unfed)

    def _hide_prefixes(self, step: ComputedStep) -> None:
        """Hides the cached prefix of new requests up to its last slot without a mark."""
        for new in step.batch.new_rows:
            if not new.num_committed:
                continue
            slots = self._table[new.row, : new.num_committed].to(torch.int64)
            ends = torch.arange(1, new.num_committed + 1, device=slots.device)
            for starts, is_fed in self._marks:
                starts[new.row] = (ends * ~is_fed[slots]).amax()
