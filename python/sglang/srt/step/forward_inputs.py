"""Makes the forward batch of a step whose rows are laid out."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.step.step_ops import ROW, RowLayout, StepCounts
from sglang.srt.step.worker import RowRef, ScheduleBatch

NO_TOKEN = 0  # fed by look-ahead rows of workers that have none


def forward_batch_of(
    batch: ScheduleBatch, counts: StepCounts, layout: RowLayout, bounds_are_exact: bool = False
) -> ForwardBatch:
    """Makes the batch of the T rows of a step that is laid out. `bounds_are_exact`: no length
    depends on a result that the host has not read."""
    q_lens, lookahead = counts.q_lens, layout.lookahead
    bounds = [kv_len + fed for kv_len, fed in zip(batch.kv_lens_before, q_lens, strict=True)]
    return ForwardBatch(
        input_ids=layout.input_ids,
        positions=layout.positions,
        slots=layout.slots,
        rows=layout.per_request[ROW],
        q_lens=q_lens,
        kv_lens=layout.kv_lens,
        kv_len_upper_bounds=bounds,
        bounds_are_exact=bounds_are_exact,
        read_index=layout.reads.index if _may_skip_rows(batch, counts) else None,
        ancestors=None if lookahead is None else lookahead.ancestors,
        shared_prefixes=batch.shared_prefixes,
        q_starts=None if lookahead is None or counts.packed is None else lookahead.q_starts,
        fixed_orders=batch.fixed_orders,
    )


def _may_skip_rows(batch: ScheduleBatch, counts: StepCounts) -> bool:
    """Tells whether the last layer may skip rows: some are not read, and no request asks for hidden
    states or for log-probabilities of a prompt, which need all."""
    if batch.hidden_rows or (batch.logprobs is not None and batch.logprobs.prompt_rows):
        return False
    return counts.num_reads < counts.num_rows


def row_indices(refs: list[RowRef], q_lens: list[int], device: torch.device) -> torch.Tensor:
    """Finds rows among the T of a step; an offset past a request's last row gives the last.

    Returns:
        [len(refs)] int64.
    """
    starts = list(itertools.accumulate(q_lens, initial=0))
    indices = [starts[i] + min(offset, q_lens[i] - 1) for i, offset in refs]
    return to_device(indices, device, torch.int64)
