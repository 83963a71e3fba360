"""What a step computes beside the forward pass, in plain torch: the CPU runtime and the oracle."""

from __future__ import annotations

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    EMITS_ONLY_CONFIRMED,
    HOST_START,
    NUM_COUNTS,
    NUM_HOST,
    NUM_READ,
    Q_LEN,
    Q_START,
    READ_START,
    ROW,
    ReadRows,
    RowLayout,
    StaticInputs,
    StepCounts,
    pack_for_device,
    places_in_uniform_graph,
)
from sglang.srt.step.worker import ScheduleBatch


class TorchStepOps:
    """See `StepOps` for what each does."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, state: RequestRows, pool: ReqToTokenPool) -> None: ...

    def lay_out(
        self,
        batch: ScheduleBatch,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        writes = batch.table_writes
        pool.write(writes.rows, writes.columns, writes.slots)
        table = pool.req_to_token
        num_reqs = len(batch.rows)
        packed = to_device(pack_for_device(batch, counts), table.device, torch.int64)
        per_request = packed[: NUM_COUNTS * num_reqs].view(NUM_COUNTS, num_reqs)
        rows = per_request[ROW]
        committed = state.committed[rows]
        kv_lens = committed + per_request[Q_LEN]
        num_read = sum(counts.num_read)
        if max(counts.q_lens) == 1 and not batch.host_tokens and num_read == num_reqs:
            slots = table[rows, committed].to(torch.int64)
            place = torch.arange(num_reqs, device=table.device)
            reads = ReadRows(place, torch.zeros_like(place), place, kv_lens, rows)
            return RowLayout(per_request, state.pending[rows, 0], committed, slots, kv_lens, reads)
        request, offsets = _spans(per_request[Q_LEN], per_request[Q_START], sum(counts.q_lens))
        positions = committed[request] + offsets
        last = state.pending.shape[1] - 1
        pending = state.pending[rows[request], offsets.clamp(max=last)]
        is_pending = offsets < state.pending_lens[rows][request]
        input_ids = torch.where(is_pending, pending, lookahead_token)
        if batch.host_tokens:
            places = per_request[HOST_START][request] + offsets
            host_tokens = packed[NUM_COUNTS * num_reqs :]
            from_host = host_tokens[places.clamp(max=len(host_tokens) - 1)]
            is_host = offsets < per_request[NUM_HOST][request]
            input_ids = torch.where(is_host, from_host, input_ids)
        return RowLayout(
            per_request=per_request,
            input_ids=input_ids,
            positions=positions,
            slots=table[rows[request], positions].to(torch.int64),
            kv_lens=kv_lens,
            reads=_reads(per_request, committed, state.pending_lens[rows], num_read),
        )

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        rows = layout.per_request[ROW]
        state.committed[rows] = layout.kv_lens
        state.pending[layout.reads.rows, 0] = tokens
        return tokens[:, None] if len(tokens) == len(rows) else state.pending[rows, :1]

    def fill(self, static: StaticInputs, key: GraphKey, batch: ForwardBatch) -> torch.Tensor | None:
        num_tokens, num_reqs = batch.input_ids.shape[0], len(batch.q_lens)
        tokens, requests = static.tokens, static.requests
        places = places_in_uniform_graph(batch, key)
        lens, index = batch.kv_lens, None
        if places is not None:  # each request's length, had it fed all its rows
            index = to_device(places, tokens.device)
            lacking = [key.width - q_len for q_len in batch.q_lens]
            lens = lens + to_device(lacking, tokens.device)
        sources = torch.stack((batch.input_ids, batch.positions, batch.slots))
        tokens[:, : key.num_tokens] = 0
        if index is None:
            tokens[:, :num_tokens] = sources
        else:
            tokens.index_copy_(1, index, sources)
        requests[0, num_reqs : key.num_reqs] = 0
        requests[1, num_reqs : key.num_reqs] = key.width
        requests[:2, :num_reqs] = torch.stack((batch.rows, lens))
        requests[2, : key.num_reqs] = 0
        if batch.read_index is not None:
            reads = batch.read_index[: key.num_reqs]
            requests[2, : len(reads)] = reads
        return index


def _spans(
    lens: torch.Tensor, starts: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the place in it [total] of each of a number of rows `lens` [R]."""
    request = torch.repeat_interleave(lens, output_size=total)
    return request, torch.arange(total, device=lens.device) - starts[request]


def _reads(
    per_request: torch.Tensor, committed: torch.Tensor, pending_lens: torch.Tensor, total: int
) -> ReadRows:
    """The rows read, `total` in all; committed, pending_lens [R] int64."""
    request, offset = _spans(per_request[NUM_READ], per_request[READ_START], total)
    num_host = per_request[NUM_HOST]
    first = torch.where(per_request[EMITS_ONLY_CONFIRMED] > 0, 0, pending_lens - 1)
    first = torch.where(num_host > 0, num_host - 1, first)
    place = first[request] + offset
    return ReadRows(
        request=request,
        offset=offset,
        index=per_request[Q_START][request] + place,
        positions=committed[request] + place + 1,
        rows=per_request[ROW][request],
    )
