"""Cuts a step down to some of its requests: those that a drafter is fed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.speculative.drafter import ChosenTokens, ComputedStep, ExtendedStep
from sglang.srt.step.step_ops import (
    NUM_READ,
    Q_LEN,
    Q_START,
    READ_START,
    AcceptedTokens,
    LookaheadLayout,
    PackedSize,
    ReadRows,
    RowLayout,
    StepCounts,
)
from sglang.srt.step.worker import ScheduleBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept:
    """The rows of P of the R requests, fed or read, among all of a step. Padding follows.

    Attributes:
        index: [T'] int64; place of each among the T of the step, of padding any.
        request: [T'] int64; its request among the P, of padding the last one.
        is_padding: [T'] bool.
        starts, ends: [P] int64; where the rows of each request begin and end among the T'.
        moved: [P] int64; places by which they have moved to the front.
    """

    index: torch.Tensor
    request: torch.Tensor
    is_padding: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    moved: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, lens: torch.Tensor, num_all: int, num_kept: int) -> _Kept:
        """
        Args:
            starts, lens: [P] int64; place of each request's first row in the step, and its rows.
            num_all, num_kept: rows of the step, and T', which has room for all of these.
        """
        ends = lens.cumsum(0)
        places = torch.arange(num_kept, device=lens.device)
        request = torch.searchsorted(ends, places, right=True)
        moved = starts - (ends - lens)
        is_padding, request = request == len(lens), request.clamp(max=len(lens) - 1)
        index = (places + moved[request]).clamp(max=num_all - 1)
        return cls(index, request, is_padding, ends - lens, ends, moved)


def part_of(step: ComputedStep, places: Sequence[int]) -> ComputedStep:
    """Returns the step as it would be with some of its R requests alone: none of the others has a
    row. Waits for nothing on the device.

    Args:
        places: of these requests among the R, ascending; one at least. Where the device divides the
            rows of a step, the part has room for the most that it may have given these requests.
    """
    layout, inputs, forward = step.chosen.layout, step.inputs, step.forward
    chosen = to_device(list(places), layout.per_request.device, torch.int64)
    plan = _plan_of(step.plan, step.batch, places)
    per_request = layout.per_request[:, chosen]
    num_rows, num_reads = len(inputs.input_ids), len(layout.reads.index)
    fed = _Kept.of(per_request[Q_START], per_request[Q_LEN], num_rows, plan.counts.num_rows)
    read = _Kept.of(
        per_request[READ_START], per_request[NUM_READ], num_reads, plan.counts.num_reads
    )
    per_request[Q_START], per_request[READ_START] = fed.starts, read.starts
    part = _layout_of(layout, per_request, chosen, fed, read)
    hidden, probs = forward.hidden, step.chosen.probs
    index = fed.index if len(hidden) == num_rows else read.index
    return ComputedStep(
        batch=_batch_of(step.batch, places),
        plan=plan,
        state=step.state,
        inputs=_inputs_of(inputs, part, chosen, places, fed.index),
        forward=replace(forward, hidden=hidden[index], taps=_taken(forward.taps, fed.index)),
        chosen=ChosenTokens(part, step.chosen.targets[read.index], _taken(probs, read.index)),
        accepted=_accepted_of(step.accepted, chosen),
    )


def extended_part_of(step: ExtendedStep, places: Sequence[int]) -> ExtendedStep:
    """Returns the step as `part_of` does; its output is that of these requests already."""
    chosen = to_device(list(places), step.rows.device, torch.int64)
    return ExtendedStep(
        batch=_batch_of(step.batch, places),
        plan=_plan_of(step.plan, step.batch, places),
        state=step.state,
        rows=step.rows[chosen],
        output=step.output,
    )


def rows_of_places(step: ComputedStep, places: Collection[int]) -> torch.Tensor:
    """[T] bool; tells of each row fed whether its request is at one of these places; of padding
    anything."""
    per_request = step.chosen.layout.per_request
    ends = per_request[Q_START] + per_request[Q_LEN]
    rows = torch.arange(len(step.inputs.slots), device=ends.device)
    requests = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    is_there = [place in places for place in range(len(ends))]
    return to_device(is_there, ends.device, torch.bool)[requests]


def others(values: Sequence[object], places: Sequence[int]) -> list[int]:
    """Returns the places of all values but those at `places`."""
    gone = set(places)
    return [place for place in range(len(values)) if place not in gone]


def _batch_of(batch: ScheduleBatch, places: Sequence[int]) -> ScheduleBatch:
    requests = _those(batch.requests, places)
    return replace(batch, requests=requests, logprobs=None, hidden_rows=[])


def _those(values: Sequence[T], places: Sequence[int]) -> list[T]:
    """Returns the values at these places; none where there are none at all."""
    return [values[place] for place in places] if values else []


def _taken(values: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[index]


def _plan_of(plan: StepPlan, batch: ScheduleBatch, places: Sequence[int]) -> StepPlan:
    counts = plan.counts
    part = StepCounts(
        _those(counts.q_lens, places),
        _those(counts.num_read, places),
        _those(counts.num_predicted, places),
        _those(counts.emits_only_confirmed, places),
        counts.is_plain,
    )
    if (size := counts.packed) is not None:
        # The others have rows too: those of prompts, and one at least of each decode.
        gone = others(batch.rows, places)
        is_prompt = [batch.num_prompt_tokens[each] > 0 for each in gone]
        fed, read = _those(counts.q_lens, gone), _those(counts.num_read, gone)
        num_rows = size.num_rows - _least(fed, is_prompt)
        num_reads = size.num_reads - _least(read, is_prompt)
        room = PackedSize(min(part.num_rows, num_rows), min(part.num_reads, num_reads))
        part = replace(part, packed=room)
    return replace(
        plan,
        counts=part,
        num_drafts=_those(plan.num_drafts, places),
        next_drafts=_those(plan.next_drafts, places),
        left_out=(),
        without_model=[new for new, old in enumerate(places) if old in plan.without_model],
    )


def _least(counts: Sequence[int], is_prompt: Sequence[bool]) -> int:
    """Returns how many rows requests have in any case, of the most of each (`RowPacking`)."""
    pairs = zip(counts, is_prompt, strict=True)
    return sum(most if is_exact else min(most, 1) for most, is_exact in pairs)


def _layout_of(
    layout: RowLayout, per_request: torch.Tensor, chosen: torch.Tensor, fed: _Kept, read: _Kept
) -> RowLayout:
    reads, lookahead = layout.reads, layout.lookahead
    index = reads.index[read.index] - fed.moved[read.request]
    if lookahead is not None:
        lookahead = LookaheadLayout(
            q_starts=torch.cat((fed.starts, fed.ends[-1:])),
            num_pending=lookahead.num_pending[chosen],
            parents=_taken(lookahead.parents, fed.index),
            ancestors=_taken(lookahead.ancestors, fed.index),
        )
    return RowLayout(
        per_request=per_request,
        input_ids=layout.input_ids[fed.index],
        positions=layout.positions[fed.index],
        slots=layout.slots[fed.index].masked_fill(fed.is_padding, 0),
        kv_lens=layout.kv_lens[chosen],
        reads=ReadRows(
            request=read.request,
            offset=reads.offset[read.index],
            index=index.clamp(0, len(fed.index) - 1),  # of padding
            positions=reads.positions[read.index],
            rows=reads.rows[read.index],
        ),
        lookahead=lookahead,
    )


def _inputs_of(
    inputs: ForwardBatch,
    part: RowLayout,
    chosen: torch.Tensor,
    places: Sequence[int],
    index: torch.Tensor,
) -> ForwardBatch:
    q_starts = None
    if inputs.q_starts is not None:
        assert part.lookahead is not None, "A packed step looks ahead."
        q_starts = part.lookahead.q_starts
    return replace(
        inputs,
        input_ids=part.input_ids,
        positions=part.positions,
        slots=part.slots,
        rows=inputs.rows[chosen],
        q_lens=_those(inputs.q_lens, places),
        kv_lens=part.kv_lens,
        kv_len_upper_bounds=_those(inputs.kv_len_upper_bounds, places),
        read_index=None if inputs.read_index is None else part.reads.index,
        ancestors=_taken(inputs.ancestors, index),
        tree_starts=_taken(inputs.tree_starts, chosen),
        q_starts=q_starts,
        hidden=_taken(inputs.hidden, index),
    )


def _accepted_of(accepted: AcceptedTokens, chosen: torch.Tensor) -> AcceptedTokens:
    return AcceptedTokens(
        accepted.accept_lens[chosen],
        accepted.kept_lens[chosen],
        accepted.next_token_ids[chosen],
        _taken(accepted.path, chosen),
        _taken(accepted.num_drafts, chosen),
    )
