"""What a step computes beside the forward pass, in plain torch: the CPU runtime and the oracle."""

from __future__ import annotations

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    EMITS_ONLY_CONFIRMED,
    NUM_COUNTS,
    NUM_PROMPT,
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
        pool.write(batch.table_writes.entries)
        table = pool.req_to_token
        num_reqs = len(batch.rows)
        packed = to_device(pack_for_device(batch, counts), table.device)
        per_request = packed.view(NUM_COUNTS, num_reqs)
        rows = per_request[ROW]
        committed = state.committed[rows]
        kv_lens = committed + per_request[Q_LEN]
        num_read = sum(counts.num_read)
        if max(counts.q_lens) == 1 and num_read == num_reqs:
            slots = table[rows, committed].to(torch.int64)
            tokens = state.tokens[rows, committed].to(torch.int64)
            place = torch.arange(num_reqs, device=table.device)
            reads = ReadRows(place, torch.zeros_like(place), place, kv_lens, rows)
            return RowLayout(per_request, tokens, committed, slots, kv_lens, reads)
        request, offsets = _spans(per_request[Q_LEN], per_request[Q_START], sum(counts.q_lens))
        positions = committed[request] + offsets
        num_prompt, pending_lens = per_request[NUM_PROMPT], state.pending_lens[rows]
        num_known = torch.where(num_prompt > 0, num_prompt, pending_lens)
        known = state.tokens[rows[request], positions].to(torch.int64)
        return RowLayout(
            per_request=per_request,
            input_ids=torch.where(offsets < num_known[request], known, lookahead_token),
            positions=positions,
            slots=table[rows[request], positions].to(torch.int64),
            kv_lens=kv_lens,
            reads=_reads(per_request, committed, pending_lens, num_read),
        )

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        rows, reads = layout.per_request[ROW], layout.reads
        state.committed[rows] = layout.kv_lens
        state.tokens[reads.rows, reads.positions] = tokens.to(torch.int32)
        state.num_tokens[reads.rows] = reads.positions + 1
        if len(tokens) < len(rows):
            tokens = state.tokens[rows, layout.kv_lens].to(torch.int64)
        return tokens[:, None]

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
    num_prompt = per_request[NUM_PROMPT]
    first = torch.where(per_request[EMITS_ONLY_CONFIRMED] > 0, 0, pending_lens - 1)
    first = torch.where(num_prompt > 0, num_prompt - 1, first)
    place = first[request] + offset
    return ReadRows(
        request=request,
        offset=offset,
        index=per_request[Q_START][request] + place,
        positions=committed[request] + place + 1,
        rows=per_request[ROW][request],
    )
