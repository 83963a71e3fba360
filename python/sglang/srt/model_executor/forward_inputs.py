"""From the scheduler's step to a forward batch: everything by gathers over device rows."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.base_worker import ScheduleBatch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.request_rows import RequestRows


def build_forward_batch(
    batch: ScheduleBatch, state: RequestRows, table: ReqToTokenPool
) -> ForwardBatch:
    """Applies the step's row and table writes, then lays out its T rows.

    A request feeds its `host_tokens`, or else the first q_len of its pending tokens.
    """
    table.write(batch.table_writes.rows, batch.table_writes.columns, batch.table_writes.slots)
    state.initialize(batch.new_rows)
    device = table.req_to_token.device
    rows = torch.tensor(batch.rows, device=device)
    committed = state.committed[rows]
    if max(batch.q_lens) == 1 and not batch.host_tokens:
        positions, input_ids = committed, state.pending[rows, 0]
        slots, kv_lens, logits_index = table.req_to_token[rows, positions], committed + 1, None
    else:
        q_lens = torch.tensor(batch.q_lens, device=device)
        ends = q_lens.cumsum(0)
        request = torch.repeat_interleave(q_lens, output_size=sum(batch.q_lens))
        offsets = torch.arange(request.shape[0], device=device) - (ends - q_lens)[request]
        positions = committed[request] + offsets
        slots = table.req_to_token[rows[request], positions]
        input_ids = _input_ids(batch, state, rows, request, offsets)
        kv_lens = committed + q_lens
        logits_index = ends[_emitting(batch, device)] - 1
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slots=slots.to(torch.int64),
        rows=rows,
        q_lens=batch.q_lens,
        kv_lens=kv_lens,
        kv_len_upper_bounds=batch.kv_len_upper_bounds,
        logits_index=logits_index,
    )


def _input_ids(
    batch: ScheduleBatch,
    state: RequestRows,
    rows: torch.Tensor,
    request: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """[T] int64: host tokens where the host knows them, pending tokens elsewhere."""
    host_flags = list(
        itertools.chain.from_iterable(
            [True] * num_host + [False] * (q_len - num_host)
            for q_len, num_host in zip(batch.q_lens, batch.num_host_tokens, strict=True)
        )
    )
    device = rows.device
    input_ids = torch.empty(len(host_flags), dtype=torch.int64, device=device)
    from_host = torch.tensor(host_flags, device=device)
    input_ids[from_host] = torch.tensor(batch.host_tokens, dtype=torch.int64, device=device)
    from_device = ~from_host
    input_ids[from_device] = state.pending[rows[request[from_device]], offsets[from_device]]
    return input_ids


def _emitting(batch: ScheduleBatch, device: torch.device) -> torch.Tensor:
    """[S] int64: indices of the requests that accept tokens in this step."""
    return torch.tensor([i for i, emits in enumerate(batch.emits) if emits], device=device).long()
