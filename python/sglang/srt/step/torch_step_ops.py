"""Implements `StepOps` in plain torch: the CPU runtime and the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from sgl_kernel import ConfirmedDrafts
from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.draft_trees import DraftTrees
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.row_packing import TorchRowPacking
from sglang.srt.step.step_ops import (
    EMITS,
    EMITS_ONLY_CONFIRMED,
    NUM_COUNTS,
    NUM_PROMPT,
    NUM_READ,
    Q_LEN,
    Q_START,
    READ_START,
    ROW,
    AcceptedTokens,
    LookaheadLayout,
    ReadRows,
    RowLayout,
    StaticInputs,
    StepCounts,
    pack_for_device,
    places_in_uniform_graph,
    places_of_reads,
    rows_before,
)
from sglang.srt.step.worker import ScheduleBatch


class TorchStepOps:
    """Implements `StepOps`."""

    def __init__(self, device: torch.device) -> None:
        self._packing = TorchRowPacking()

    def warm_up(self, state: RequestRows, pool: ReqToTokenPool) -> None: ...

    def lay_out(
        self,
        batch: ScheduleBatch,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        self.write_table(batch.table_writes, pool)
        packed = to_device(pack_for_device(batch, counts), pool.req_to_token.device)
        per_request = packed.view(NUM_COUNTS, len(batch.rows))
        return self.lay_out_rows(per_request, counts, state, pool, lookahead_token)

    def write_table(self, writes: PageTableWrites, pool: ReqToTokenPool) -> None:
        pool.write(writes.entries)

    def lay_out_rows(
        self,
        per_request: torch.Tensor,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        table, num_reqs = pool.req_to_token, per_request.shape[1]
        rows = per_request[ROW]
        committed = state.committed[rows]
        kv_lens = committed + per_request[Q_LEN]
        num_read = counts.num_reads
        if counts.is_plain and max(counts.q_lens) == 1 and num_read == num_reqs:
            slots = table[rows, committed].to(torch.int64)
            tokens = state.tokens[rows, committed].to(torch.int64)
            place = torch.arange(num_reqs, device=table.device)
            reads = ReadRows(place, torch.zeros_like(place), place, kv_lens, rows)
            return RowLayout(per_request, tokens, committed, slots, kv_lens=kv_lens, reads=reads)
        is_packed = counts.packed is not None
        if is_packed:
            self._packing.pack(per_request, state, counts.num_rows)
            kv_lens = committed + per_request[Q_LEN]
        fed = _spans(per_request[Q_LEN], per_request[Q_START], counts.num_rows, is_packed)
        request, offsets = fed.request, fed.offset
        num_prompt, pending_lens = per_request[NUM_PROMPT], state.pending_lens[rows]
        num_known = torch.where(num_prompt > 0, num_prompt, pending_lens)
        is_known = offsets < num_known[request]
        columns = committed[request] + offsets
        known = state.tokens[rows[request], columns].to(torch.int64)
        lookahead, positions = None, columns
        if not counts.is_plain:
            lookahead = self._lookahead(per_request, pending_lens)
        if lookahead is not None and state.trees is not None:
            is_node = is_known & (num_prompt[request] == 0)
            if fed.exists is not None:
                is_node &= fed.exists
            lookahead, depths = _with_trees(lookahead, state.trees, rows[request], offsets, is_node)
            positions = committed[request] + depths
        return RowLayout(
            per_request=per_request,
            input_ids=fed.or_zero(torch.where(is_known, known, lookahead_token)),
            positions=fed.or_zero(positions),
            slots=fed.or_zero(table[rows[request], columns].to(torch.int64)),
            kv_lens=kv_lens,
            reads=_reads(per_request, positions, pending_lens, num_read, is_packed),
            lookahead=lookahead,
        )

    def _lookahead(self, per_request: torch.Tensor, pending_lens: torch.Tensor) -> LookaheadLayout:
        """Lays out chains; pending_lens [R] int64."""
        ends = (per_request[Q_START] + per_request[Q_LEN])[-1:]
        confirms = (per_request[NUM_PROMPT] == 0) & (per_request[EMITS_ONLY_CONFIRMED] > 0)
        num_pending = torch.where(confirms, pending_lens, 1)
        return LookaheadLayout(
            q_starts=torch.cat((per_request[Q_START], ends)),
            num_pending=torch.minimum(num_pending, per_request[Q_LEN]),
            parents=None,
            ancestors=None,
        )

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        rows, reads = layout.per_request[ROW], layout.reads
        state.committed[rows] = torch.where(rows == state.padding_row, 0, layout.kv_lens)
        state.tokens[reads.rows, reads.positions] = tokens.to(torch.int32)
        state.num_tokens[reads.rows] = reads.positions + 1
        if len(tokens) < len(rows):
            tokens = state.tokens[rows, layout.kv_lens].to(torch.int64)
        return tokens[:, None]

    def commit_run(
        self,
        layout: RowLayout,
        targets: torch.Tensor,
        confirmed: ConfirmedDrafts,
        num_unconfirmed: torch.Tensor | None,
        max_accepted: int,
        state: RequestRows,
    ) -> AcceptedTokens:
        assert layout.lookahead is not None, "A step without look-ahead."
        per_request = layout.per_request
        rows, num_prompt, emits = (per_request[row] for row in (ROW, NUM_PROMPT, EMITS))
        only_confirmed = per_request[EMITS_ONLY_CONFIRMED] > 0
        num_confirmed = confirmed.num_confirmed.clamp(max=max_accepted - 1)
        num_confirmed = torch.where(only_confirmed, num_confirmed, 0)
        run, path = num_confirmed + 1, confirmed.path[:, :max_accepted]
        offsets = torch.arange(max_accepted, device=rows.device)
        if num_unconfirmed is not None:
            run = torch.where(only_confirmed, run, num_unconfirmed)
            path = torch.where(only_confirmed[:, None], path, offsets.to(path.dtype))
        places = per_request[READ_START][:, None] + path.clamp(min=0)
        tokens = targets[places.clamp(max=len(targets) - 1)]
        kept = torch.where(only_confirmed, run, state.pending_lens[rows])
        kept = torch.where(num_prompt > 0, num_prompt, kept)
        committed = state.committed[rows] + kept
        state.committed[rows] = torch.where(rows == state.padding_row, 0, committed)
        pending = torch.where(only_confirmed, 1, run)
        state.pending_lens[rows] = torch.where(emits > 0, pending, 1)
        ends = torch.where(emits > 0, committed + pending, state.num_tokens[rows])
        state.num_tokens[rows] = ends
        # Where the run is shorter a column occurs twice and gets the same token twice.
        columns = torch.where(offsets < (run * emits)[:, None], offsets, 0)
        first = (committed - num_confirmed)[:, None]
        known = state.tokens[rows[:, None], first + columns]
        given = tokens.gather(1, columns).to(torch.int32)
        given = torch.where(emits[:, None] > 0, given, known)
        state.tokens[rows[:, None], first + columns] = given
        return AcceptedTokens(
            accept_lens=run * emits,
            kept_lens=kept,
            next_token_ids=tokens,
            path=path,
            num_drafts=layout.lookahead.num_pending - 1,
        )

    def write_drafts(
        self,
        state: RequestRows,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        state.write_drafts(rows, tokens, num_drafts, parents, confidence)

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
            reads = places_of_reads(batch.read_index, key, index)[: key.num_reqs]
            requests[2, : len(reads)] = reads
        hidden = static.hidden_of(key)
        if hidden is not None:
            hidden.zero_()
            if batch.hidden is not None:
                hidden[slice(num_tokens) if index is None else index] = batch.hidden
        if key.is_packed:
            starts = batch.q_starts
            if starts is None:
                starts = to_device(rows_before(batch), tokens.device)
            static.q_starts[: num_reqs + 1] = starts
            static.q_starts[num_reqs + 1 : key.num_reqs + 1] = starts[-1]
        if key.has_tree:
            _fill_trees(static, key, batch, index)
        return index


class _Spans(NamedTuple):
    """Rows of requests, one after the other.

    Attributes:
        request, offset: [T] int64; for padding, arbitrary valid numbers.
        exists: [T] bool; False for padding; None where there is none.
    """

    request: torch.Tensor
    offset: torch.Tensor
    exists: torch.Tensor | None

    def or_zero(self, values: torch.Tensor) -> torch.Tensor:
        """Values [T], 0 where there is padding."""
        return values if self.exists is None else torch.where(self.exists, values, 0)


def _spans(lens: torch.Tensor, starts: torch.Tensor, total: int, is_padded: bool) -> _Spans:
    """The `total` rows of R requests; lens, starts [R] int64."""
    if not is_padded:
        request = torch.repeat_interleave(lens, output_size=total)
        place = torch.arange(total, device=lens.device)
        return _Spans(request, place - starts[request], None)
    place = torch.arange(total, device=lens.device)
    request = torch.searchsorted(starts + lens, place, right=True).clamp(max=len(lens) - 1)
    offset = place - starts[request]
    exists = offset < lens[request]
    return _Spans(request, torch.where(exists, offset, 0), exists)


def _with_trees(
    chains: LookaheadLayout,
    trees: DraftTrees,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    is_node: torch.Tensor,
) -> tuple[LookaheadLayout, torch.Tensor]:
    """Adds the trees of a step's T rows to the layout; returns it with depths [T] int64. Rows after
    a tree see all rows before them, and their depth is their offset, as in a chain.

    Args:
        rows, offsets: [T] int64; row of the table, and place among the rows of the request.
        is_node: [T] bool; whether the row is a node of its request's tree.
    """
    nodes = offsets.clamp(max=trees.parents.shape[1] - 1)
    parents = torch.where(is_node, trees.parents[rows, nodes], -1).to(torch.int32)
    ancestors = torch.where(is_node, trees.ancestors[rows, nodes], -1)
    depths = torch.where(is_node, trees.depths[rows, nodes], offsets)
    return replace(chains, parents=parents, ancestors=ancestors), depths


def _fill_trees(
    static: StaticInputs, key: GraphKey, batch: ForwardBatch, index: torch.Tensor | None
) -> None:
    """Fills the inputs of trees; `index`: place of each row of the step, None if they are the
    first."""
    assert static.ancestors is not None
    assert static.tree_starts is not None
    static.ancestors[: key.num_tokens] = -1
    if batch.ancestors is not None:
        places = slice(len(batch.ancestors)) if index is None else index
        static.ancestors[places] = batch.ancestors
    fed = static.q_starts[: key.num_reqs + 1].diff() if key.is_packed else key.width
    static.tree_starts[: key.num_reqs] = static.requests[1, : key.num_reqs] - fed
    if batch.tree_starts is not None:
        static.tree_starts[: len(batch.q_lens)] = batch.tree_starts


def _reads(
    per_request: torch.Tensor,
    positions: torch.Tensor,
    pending_lens: torch.Tensor,
    total: int,
    is_packed: bool,
) -> ReadRows:
    """Finds the rows read, `total` in all; positions [T], pending_lens [R] int64."""
    spans = _spans(per_request[NUM_READ], per_request[READ_START], total, is_packed)
    request, offset = spans.request, spans.offset
    num_prompt = per_request[NUM_PROMPT]
    first = torch.where(per_request[EMITS_ONLY_CONFIRMED] > 0, 0, pending_lens - 1)
    first = torch.where(num_prompt > 0, num_prompt - 1, first)
    index = spans.or_zero(per_request[Q_START][request] + first[request] + offset)
    return ReadRows(
        request=spans.or_zero(request),
        offset=offset,
        index=index,
        positions=spans.or_zero(positions[index] + 1),
        rows=spans.or_zero(per_request[ROW][request]),
    )
