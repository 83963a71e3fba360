"""From the scheduler's step to a forward batch: everything by gathers over device rows."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.base_worker import RowRef, ScheduleBatch
from sglang.srt.device_copies import to_device
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.request_rows import RequestRows

NO_TOKEN = 0  # fed by look-ahead rows of workers that have none


def apply_writes(batch: ScheduleBatch, state: RequestRows, table: ReqToTokenPool) -> None:
    """The step's writes to the page table and its new rows, before anything else of the step."""
    writes = batch.table_writes
    table.write(writes.rows, writes.columns, writes.slots)
    state.initialize(batch.new_rows)


def build_forward_batch(
    batch: ScheduleBatch,
    q_lens: list[int],
    state: RequestRows,
    table: ReqToTokenPool,
    lookahead_token: int = NO_TOKEN,
    bounds_are_exact: bool = False,
) -> ForwardBatch:
    """Lays out the T rows of a step.

    A request feeds its `host_tokens`, or else its pending tokens; the rest of its q_lens[i] rows
    feed `lookahead_token`. `bounds_are_exact`: no length depends on a result that the host has not
    read.
    """
    device = table.req_to_token.device
    rows = to_device(batch.rows, device)
    committed = state.committed[rows]
    if max(q_lens) == 1 and not batch.host_tokens:
        positions, input_ids = committed, state.pending[rows, 0]
        slots, kv_lens = table.req_to_token[rows, positions], committed + 1
    else:
        lens = to_device(q_lens, device)
        request = torch.repeat_interleave(lens, output_size=sum(q_lens))
        offsets = torch.arange(request.shape[0], device=device) - (lens.cumsum(0) - lens)[request]
        positions = committed[request] + offsets
        slots = table.req_to_token[rows[request], positions]
        input_ids = _input_ids(batch, q_lens, state, rows[request], offsets, lookahead_token)
        kv_lens = committed + lens
    trimmed = zip(batch.kv_len_upper_bounds, batch.max_q_lens, q_lens, strict=True)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slots=slots.to(torch.int64),
        rows=rows,
        q_lens=q_lens,
        kv_lens=kv_lens,
        kv_len_upper_bounds=[bound - reserved + fed for bound, reserved, fed in trimmed],
        bounds_are_exact=bounds_are_exact,
    )


def _input_ids(
    batch: ScheduleBatch,
    q_lens: list[int],
    state: RequestRows,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    lookahead_token: int,
) -> torch.Tensor:
    """[T] int64: host tokens, pending tokens or `lookahead_token`; rows, offsets [T] int64."""
    num_host = batch.num_host_tokens
    last = state.pending.shape[1] - 1
    pending = state.pending[rows, offsets.clamp(max=last)]
    input_ids = torch.where(offsets < state.pending_lens[rows], pending, lookahead_token)
    if batch.host_tokens:
        starts = itertools.accumulate(q_lens, initial=0)
        runs = (range(start, start + host) for start, host in zip(starts, num_host, strict=False))
        from_host = to_device(list(itertools.chain.from_iterable(runs)), rows.device)
        input_ids[from_host] = to_device(batch.host_tokens, rows.device)
    return input_ids


def flat_rows(refs: list[RowRef], q_lens: list[int], device: torch.device) -> torch.Tensor:
    """Indices among the T rows of a step; an offset past a request's last row gives the last.

    Returns:
        [len(refs)] int64.
    """
    starts = list(itertools.accumulate(q_lens, initial=0))
    indices = [starts[i] + min(offset, q_lens[i] - 1) for i, offset in refs]
    return to_device(indices, device, torch.int64)
