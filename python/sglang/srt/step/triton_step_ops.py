"""Implements `StepOps`, each operation in one Triton kernel.

The host's numbers of a step travel in one copy. Triton compiles a kernel anew for each value of a
constant, and for tensors that do not begin at a multiple of 16 bytes. So numbers of requests and of
rows are no constants, and all tensors begin at such a multiple.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel import ConfirmedDrafts
from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.layers.triton_launch import begin, report_outside
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.draft_trees import DraftTrees
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    NUM_COUNTS,
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
from sglang.srt.step.triton_commit_run import commit_kernel, commit_run_kernel, step_launch
from sglang.srt.step.triton_layout import lay_out_kernel
from sglang.srt.step.triton_row_packing import TritonRowPacking, can_pack
from sglang.srt.step.triton_write_drafts import write_drafts
from sglang.srt.step.worker import BatchRequest, ScheduleBatch

BLOCK = 128
BLOCK_HIDDEN = 1024


@triton.jit(do_not_specialize=["start", "count", "early"])
def _write_table_kernel(
    packed_ptr, table_ptr, outside_ptr, start, count, table_width,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """table[rows, columns] = slots, but for columns outside of a row; rows, columns and slots stand
    after the first `start` integers of `packed_ptr`."""
    begin(PDL, early)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    source = packed_ptr + start + place
    row = tl.load(source, mask=mask, other=0)
    column = tl.load(source + count, mask=mask, other=0)
    slot = tl.load(source + 2 * count, mask=mask, other=0)
    is_inside = (column >= 0) & (column < table_width)
    report_outside(outside_ptr, column, mask & ~is_inside)
    tl.store(table_ptr + row * table_width + column, slot.to(tl.int32), mask=mask & is_inside)


_FILL_NUMBERS = [
    *("num_tokens", "num_reqs", "num_reads", "padded_tokens", "padded_reqs", "width"),
    *("is_spread", "hidden_stride", "hidden_width"),
]


@triton.jit
def _fill_hidden(
    hidden_ptr, out_ptr, spread_ptr, hidden_stride, hidden_width, num_tokens, padded_tokens,
    is_spread, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's part of a row of the hidden states [padded_tokens, hidden_width]: of each row
    there are as many parts as it has blocks, one after the other."""
    num_parts = tl.cdiv(hidden_width, BLOCK)
    place = tl.arange(0, BLOCK)
    column = tl.program_id(0) % num_parts * BLOCK + place
    row = tl.program_id(0) // num_parts + place.to(tl.int64) * 0  # the same for all
    is_inside = (row < padded_tokens) & (column < hidden_width)
    spreads = row * 0 + is_spread != 0
    moved = tl.load(spread_ptr + row, mask=is_inside & spreads, other=-1)
    source = tl.where(spreads, moved, row)
    exists = is_inside & (source >= 0) & (source < num_tokens)
    values = tl.load(hidden_ptr + source * hidden_stride + column, mask=exists, other=0.0)
    tl.store(out_ptr + row * hidden_width + column, values, mask=is_inside)


@triton.jit(
    do_not_specialize=[
        *_FILL_NUMBERS,
        *("q_starts_ptr", "ancestors_ptr", "tree_starts_ptr", "num_ancestors", "num_tree_starts"),
        *("hidden_ptr", "early"),
    ]
)
def _fill_kernel(
    input_ids_ptr, positions_ptr, slots_ptr, rows_ptr, kv_lens_ptr, reads_ptr, spread_ptr,
    tokens_ptr, requests_ptr, token_stride, request_stride,
    num_tokens, num_reqs, num_reads, padded_tokens, padded_reqs, width, is_spread,
    q_starts_ptr, q_starts_out_ptr,
    ancestors_ptr, tree_starts_ptr, ancestors_out_ptr, tree_starts_out_ptr,
    num_ancestors, num_tree_starts, hidden_ptr, hidden_out_ptr, hidden_stride, hidden_width,
    IS_PACKED: tl.constexpr, HAS_TREE: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (blocks of the graph's rows, or of its requests and one more, padding included; or parts
    of its hidden states, if there are more). `spread_ptr`, if `is_spread`: for each of these rows
    the step's row or -1, then for each request the rows that it lacks."""
    begin(PDL, early)
    if HAS_HIDDEN:
        _fill_hidden(
            hidden_ptr, hidden_out_ptr, spread_ptr, hidden_stride, hidden_width, num_tokens,
            padded_tokens, is_spread, BLOCK_HIDDEN,
        )  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_token = place < padded_tokens
    has_request = place < padded_reqs
    spreads = place * 0 + is_spread != 0
    moved = tl.load(spread_ptr + place, mask=has_token & spreads, other=-1)
    lacking = tl.load(spread_ptr + padded_tokens + place, mask=has_request & spreads, other=0)
    source = tl.where(spreads, moved, place)
    exists = (source >= 0) & (source < num_tokens)
    out = tokens_ptr + place
    tl.store(out, tl.load(input_ids_ptr + source, mask=exists, other=0), mask=has_token)
    out += token_stride
    tl.store(out, tl.load(positions_ptr + source, mask=exists, other=0), mask=has_token)
    out += token_stride
    tl.store(out, tl.load(slots_ptr + source, mask=exists, other=0), mask=has_token)
    if HAS_TREE:
        mask = exists & (source < num_ancestors)
        ancestors = tl.load(ancestors_ptr + source, mask=mask, other=-1)
        tl.store(ancestors_out_ptr + place, ancestors, mask=has_token)
    exists = place < num_reqs
    out = requests_ptr + place
    tl.store(out, tl.load(rows_ptr + place, mask=exists, other=0), mask=has_request)
    kv_len = tl.load(kv_lens_ptr + place, mask=exists, other=0) + lacking
    kv_len = tl.where(exists, kv_len, width)
    tl.store(out + request_stride, kv_len, mask=has_request)
    read = tl.load(reads_ptr + place, mask=has_request & (place < num_reads), other=0)
    tl.store(out + 2 * request_stride, read, mask=has_request)
    fed = width
    if IS_PACKED:
        start = tl.load(q_starts_ptr + tl.minimum(place, num_reqs))
        tl.store(q_starts_out_ptr + place, start, mask=place <= padded_reqs)
        fed = tl.load(q_starts_ptr + tl.minimum(place + 1, num_reqs)) - start
    if HAS_TREE:
        mask = exists & (place < num_tree_starts)
        tree_start = tl.load(tree_starts_ptr + place, mask=mask, other=0)
        tree_start = tl.where(mask, tree_start, kv_len - fed)
        tl.store(tree_starts_out_ptr + place, tree_start, mask=has_request)


class TritonStepOps:
    """Implements `StepOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launch = {"BLOCK": BLOCK, **step_launch(device)}
        self._packing: TritonRowPacking | None = None
        self._known_q_lens: list[int] = []
        self._known_q_starts = torch.zeros(1, dtype=torch.int64, device=device)

    def warm_up(self, state: RequestRows, pool: ReqToTokenPool) -> None:
        batch = warm_up_batch()
        layout = self.lay_out(batch, StepCounts.plain(batch), state, pool, 0)
        zero = torch.zeros_like(layout.kv_lens)
        self.commit(layout, zero, state)
        if state.max_pending == 1:
            return
        self.write_drafts(state, zero, zero[:, None], confidence=zero[:, None].float())
        layout = self.lay_out(batch, StepCounts([1], [1], [1], [True]), state, pool, 0)
        confirmed = ConfirmedDrafts(zero, zero.view(1, 1).to(torch.int32), zero)
        for num_unconfirmed in (None, zero + 1):
            self.commit_run(layout, zero, confirmed, num_unconfirmed, 1, state)
        if state.confidence is not None and can_pack(state):
            self._packing = TritonRowPacking(self._device, state.num_rows)
            self._packing.pack(layout.per_request, state, 1)

    def lay_out(
        self,
        batch: ScheduleBatch,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        packed = pack_for_device(batch, counts)
        on_device = self._upload(packed, batch.table_writes, pool)
        per_request = on_device[: len(packed)].view(NUM_COUNTS, len(batch.rows))
        return self.lay_out_rows(per_request, counts, state, pool, lookahead_token)

    def write_table(self, writes: PageTableWrites, pool: ReqToTokenPool) -> None:
        if writes.entries.shape[1]:
            self._upload(np.empty(0, dtype=np.int64), writes, pool)

    def _upload(
        self, numbers: np.ndarray, writes: PageTableWrites, pool: ReqToTokenPool
    ) -> torch.Tensor:
        """Copies numbers [N] int64 and, after them, the writes to the device, and carries these
        out."""
        entries, table = writes.entries, pool.req_to_token
        start, count = len(numbers), entries.shape[1]
        on_device = to_device(np.concatenate((numbers, entries.ravel())), self._device)
        if count:
            _write_table_kernel[(triton.cdiv(count, BLOCK),)](
                on_device, table, pool.outside, start, count, table.shape[1], **self._launch
            )
        return on_device

    def lay_out_rows(
        self,
        per_request: torch.Tensor,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        num_reqs, table = per_request.shape[1], pool.req_to_token
        num_tokens, num_read = counts.num_rows, counts.num_reads
        if counts.packed is not None:
            assert self._packing is not None, "Packed steps need confidences, and of no more rows."
            self._packing.pack(per_request, state, num_tokens)
        lookahead = None if counts.is_plain else self._lookahead(num_reqs, counts, state.trees)
        trees = None if lookahead is None else state.trees
        is_packed = counts.packed is not None
        tokens = self._aligned(3, num_tokens, is_packed)
        reads = self._aligned(5, num_read, is_packed)
        kv_lens = torch.empty(num_reqs, dtype=torch.int64, device=self._device)
        lay_out_kernel[(num_reqs, triton.cdiv(max(counts.q_lens), BLOCK))](
            per_request, state.committed, state.pending_lens, state.tokens, table, pool.outside,
            *((None,) * 3 if trees is None else (trees.parents, trees.depths, trees.ancestors)),
            tokens, kv_lens, reads,
            *((None,) * 4 if lookahead is None else (lookahead.q_starts, lookahead.num_pending,
                                                    lookahead.parents, lookahead.ancestors)),
            num_reqs, tokens.stride(0), reads.stride(0), table.shape[1], lookahead_token,
            state.max_pending, HAS_LOOKAHEAD=lookahead is not None, HAS_TREE=trees is not None,
            **self._launch,
        )  # fmt: skip
        input_ids, positions, slots = tokens.unbind()
        return RowLayout(
            per_request,
            input_ids,
            positions,
            slots,
            kv_lens=kv_lens,
            reads=ReadRows(*reads.unbind()),
            lookahead=lookahead,
        )

    def _lookahead(
        self, num_reqs: int, counts: StepCounts, trees: DraftTrees | None
    ) -> LookaheadLayout:
        """Makes room for a layout; tree fields of padding rows keep their values."""
        size = num_reqs // 2 * 2 + 2  # num_reqs + 1 at least, and a multiple of 16 bytes
        numbers = torch.empty(size + num_reqs, dtype=torch.int64, device=self._device)
        parents = ancestors = None
        if trees is not None:
            parents = torch.empty(counts.num_rows, dtype=torch.int32, device=self._device)
            ancestors = torch.empty(counts.num_rows, dtype=torch.int64, device=self._device)
            if counts.packed is not None:
                for values in (parents, ancestors):
                    values.fill_(-1)
        starts, num_pending = numbers[: num_reqs + 1], numbers[size:]
        return LookaheadLayout(starts, num_pending, parents, ancestors)

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        num_reqs = layout.kv_lens.shape[0]
        out = torch.empty((num_reqs, 1), dtype=torch.int64, device=self._device)
        commit_kernel[(triton.cdiv(num_reqs, BLOCK),)](
            layout.per_request, layout.kv_lens, tokens,
            state.committed, state.num_tokens, state.tokens, state.outside, out,
            num_reqs, state.tokens.shape[1], state.padding_row, **self._launch,
        )  # fmt: skip
        return out

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
        num_reqs, width = layout.kv_lens.shape[0], max_accepted
        out = torch.empty((num_reqs, 3 + width), dtype=torch.int64, device=self._device)
        path = torch.empty((num_reqs, width), dtype=torch.int32, device=self._device)
        commit_run_kernel[(num_reqs,)](
            layout.per_request, layout.lookahead.num_pending, targets,
            confirmed.num_confirmed, confirmed.path, num_unconfirmed,
            state.committed, state.pending_lens, state.num_tokens, state.tokens, state.outside,
            out, path, num_reqs, len(targets), confirmed.path.shape[1], width,
            state.tokens.shape[1], state.padding_row,
            HAS_UNCONFIRMED=num_unconfirmed is not None,
            BLOCK=max(2, triton.next_power_of_2(state.max_pending)), num_warps=1,
            **step_launch(self._device),
        )  # fmt: skip
        accepted, kept, num_drafts = out[:, 0], out[:, 1], out[:, 2]
        return AcceptedTokens(accepted, kept, out[:, 3:], path, num_drafts)

    def write_drafts(
        self,
        state: RequestRows,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        state.write_trees(rows, tokens, parents)
        write_drafts(state, rows, tokens, num_drafts, confidence)

    def fill(self, static: StaticInputs, key: GraphKey, batch: ForwardBatch) -> torch.Tensor | None:
        num_tokens, num_reqs = batch.input_ids.shape[0], len(batch.q_lens)
        places = places_in_uniform_graph(batch, key)
        sources, index = batch.rows, None
        if places is not None:
            packed = [-1] * key.num_tokens
            for row, place in enumerate(places):
                packed[place] = row
            packed += [key.width - q_len for q_len in batch.q_lens]
            packed += [0] * (key.num_reqs - num_reqs)
            sources = to_device(packed + places, self._device, torch.int64)
            index = sources[len(packed) :]
        nothing = batch.rows[:0]
        reads = nothing if batch.read_index is None else batch.read_index
        reads = places_of_reads(reads, key, index)
        starts = (self._q_starts(batch), static.q_starts) if key.is_packed else (None, None)
        ancestors = nothing if batch.ancestors is None else batch.ancestors
        tree_starts = nothing if batch.tree_starts is None else batch.tree_starts
        trees: tuple[torch.Tensor | None, ...] = (None,) * 4
        if key.has_tree:
            trees = ancestors, tree_starts, static.ancestors, static.tree_starts
        num_programs = triton.cdiv(max(key.num_tokens, key.num_reqs + key.is_packed), BLOCK)
        hidden_out, hidden = static.hidden_of(key), None
        if hidden_out is not None:
            hidden = hidden_out[:0] if batch.hidden is None else batch.hidden
            assert hidden.stride(1) == 1, "Rows of hidden states lie in one piece."
            num_parts = triton.cdiv(key.hidden_width, BLOCK_HIDDEN)
            num_programs = max(num_programs, key.num_tokens * num_parts)
        _fill_kernel[(num_programs,)](
            batch.input_ids, batch.positions, batch.slots, batch.rows, batch.kv_lens,
            reads, sources,
            static.tokens, static.requests, static.tokens.stride(0), static.requests.stride(0),
            num_tokens, num_reqs, len(reads), key.num_tokens, key.num_reqs, key.width,
            int(places is not None),
            *starts, *trees, len(ancestors), len(tree_starts),
            hidden, hidden_out, 0 if hidden is None else hidden.stride(0), key.hidden_width,
            IS_PACKED=key.is_packed, HAS_TREE=key.has_tree, HAS_HIDDEN=hidden_out is not None,
            BLOCK_HIDDEN=BLOCK_HIDDEN, **self._launch,
        )  # fmt: skip
        return index

    def _aligned(self, count: int, size: int, is_padded: bool) -> torch.Tensor:
        """[count, size] int64; each row begins at a multiple of 16 bytes. Zeros, where padding rows
        are not written."""
        make = torch.zeros if is_padded else torch.empty
        rows = make((count, size + size % 2), dtype=torch.int64, device=self._device)
        return rows[:, :size]

    def _q_starts(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns `q_starts`, also for a batch that is not packed. A step of the same lengths as
        the last one copies nothing."""
        if batch.q_starts is not None:
            return batch.q_starts
        if batch.q_lens != self._known_q_lens:
            self._known_q_lens = list(batch.q_lens)
            self._known_q_starts = to_device(rows_before(batch), self._device, torch.int64)
        return self._known_q_starts


def warm_up_batch() -> ScheduleBatch:
    """A step of row 0 that feeds one pending token into the dummy slot."""
    writes = PageTableWrites(np.zeros((3, 1), dtype=np.int64))
    return ScheduleBatch([BatchRequest(row=0)], table_writes=writes, all_greedy=True)
