"""Trees of drafts found by Triton: one kernel for each draft step, and one for the trees."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.model_executor.draft_tree_passes import DraftedTrees, TorchTreeSearch, TreeSearch
from sglang.srt.step.draft_shapes import TreeShape

MOST_TOPK = 16  # largest K: a program compares all K * K children of a beam with each other
BEST_BLOCK = 32  # nodes of a program of `best_kernel`
_BEST_CHUNK = 64  # nodes that it compares them with at once
_HIDDEN_BLOCK = 1024
# What a step is fed and `grow_kernel` remembers of it, in this order.
_TOKENS, _ANCESTORS, _SLOTS, _POSITIONS, _NUMBERS, _KV_LENS = range(6)
_ANCESTORS_AT = tl.constexpr(_ANCESTORS)
_SLOTS_AT = tl.constexpr(_SLOTS)
_POSITIONS_AT = tl.constexpr(_POSITIONS)
_NUMBERS_AT = tl.constexpr(_NUMBERS)
_KV_LENS_AT = tl.constexpr(_KV_LENS)
_GREATEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _num_before(other_score, other, score, node):
    """Counts how many of the nodes `other` [m] come before each `node` [n] int32: those with a
    better score, and of equal ones those with a lower number."""
    is_equal = (other_score[None, :] == score[:, None]) & (other[None, :] < node[:, None])
    is_before = (other_score[None, :] > score[:, None]) | is_equal
    return tl.sum(is_before.to(tl.int32), 1)


@triton.jit
def _clean(score):
    """As `nan_to_num(0.0)`."""
    return tl.where(score == score, tl.minimum(score, _GREATEST), 0.0)


@triton.jit
def _children(token_ids_ptr, logprobs_ptr, target_ids_ptr, place, exists):
    """The target's ids, and the probabilities after their parents."""
    token = tl.load(token_ids_ptr + place, mask=exists, other=0)
    if target_ids_ptr is not None:
        token = tl.load(target_ids_ptr + token, mask=exists, other=0)
    return token, tl.exp(tl.load(logprobs_ptr + place, mask=exists, other=0.0))


@triton.jit
def _write_step(
    fed_ptr, beam_scores_ptr, token, score, number, row, rank, is_fed, request, level, num_steps,
    fed_stride, TOPK: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what the next step is fed, but for places, and what the one after it needs to know."""
    step = fed_ptr + level * fed_stride
    field = num_steps * fed_stride
    own = request * TOPK + rank
    bit = level * TOPK + tl.minimum(rank, TOPK - 1)
    seen = tl.full([BLOCK], 1, tl.int64) << bit.to(tl.int64)
    if not IS_FIRST:
        before = step - fed_stride + _ANCESTORS_AT * field
        seen |= tl.load(before + request * TOPK + row, mask=is_fed, other=0)
    tl.store(step + own, token, mask=is_fed)
    tl.store(step + _ANCESTORS_AT * field + own, seen, mask=is_fed)
    tl.store(step + _NUMBERS_AT * field + own, number.to(tl.int64), mask=is_fed)
    tl.store(beam_scores_ptr + level * fed_stride + own, score, mask=is_fed)


@triton.jit
def _write_places(
    starts_ptr, rows_ptr, slots_ptr, kv_lens_ptr, table_ptr, fed_ptr, rank, is_fed, request, level,
    num_steps, fed_stride, table_width, TOPK: tl.constexpr,
):  # fmt: skip
    """Positions, slots and the length of a request's KV in the next step. Padding, and what is
    outside of the table, gets the dummy slot."""
    step = fed_ptr + level * fed_stride
    field = num_steps * fed_stride
    own = request * TOPK + rank
    start = tl.load(starts_ptr + request)
    column = start + level * TOPK + rank
    slots = table_ptr + tl.load(rows_ptr + request) * table_width
    slot = tl.load(slots + column, mask=is_fed & (column < table_width), other=0)
    slot = tl.where(tl.load(slots_ptr + request) > 0, slot, 0)
    tl.store(step + _SLOTS_AT * field + own, slot.to(tl.int64), mask=is_fed)
    tl.store(step + _POSITIONS_AT * field + own, start + level + rank * 0, mask=is_fed)
    kv_len = tl.load(kv_lens_ptr + request) + (level + 1) * TOPK - 1
    tl.store(step + _KV_LENS_AT * field + request, kv_len)


@triton.jit
def _copy_hidden(
    hidden_ptr, hidden_out_ptr, rank, row, exists, request, num_rows, hidden_size, hidden_stride,
    TOPK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Some columns of the rows that the best children follow."""
    out = tl.arange(0, BLOCK_ROWS)
    is_source = (rank[None, :] == out[:, None]) & exists[None, :]
    source = request * num_rows + tl.sum(tl.where(is_source, row[None, :], 0), 1)
    column = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    is_value = (out[:, None] < TOPK) & (column[None, :] < hidden_size)
    values = tl.load(
        hidden_ptr + source.to(tl.int64)[:, None] * hidden_stride + column[None, :], mask=is_value
    )
    out_row = (request * TOPK + out).to(tl.int64)
    to = hidden_out_ptr + out_row[:, None] * hidden_size + column[None, :]
    tl.store(to, values, mask=is_value)


@triton.jit(
    do_not_specialize=[
        "level", "num_steps", "num_found", "fed_stride", "table_width", "hidden_size",
        "hidden_stride", "early",
    ]
)  # fmt: skip
def grow_kernel(
    token_ids_ptr, logprobs_ptr, target_ids_ptr, hidden_ptr,
    starts_ptr, rows_ptr, slots_ptr, kv_lens_ptr, table_ptr,
    found_ids_ptr, found_scores_ptr, found_parents_ptr,
    fed_ptr, beam_scores_ptr, hidden_out_ptr,
    level, num_steps, num_found, fed_stride, table_width, hidden_size, hidden_stride,
    TOPK: tl.constexpr, IS_FIRST: tl.constexpr, HAS_NEXT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, blocks of hidden states): the first block does all but hidden states.

    Args:
        token_ids_ptr, logprobs_ptr: [R, P, TOPK]; P is 1 if IS_FIRST, else TOPK.
        hidden_ptr: [R * P, hidden_size], with this row stride.
        starts_ptr, rows_ptr, slots_ptr, kv_lens_ptr: [R]; of the first step.
        found_ids_ptr, found_scores_ptr, found_parents_ptr: [R, num_found]; int64, float32, int32.
        fed_ptr: [6, num_steps, fed_stride] int64.
        beam_scores_ptr: [num_steps, fed_stride] float32.
        level: draft steps before; the next one, if it HAS_NEXT, has this number.
    """
    begin(PDL, early)
    request = tl.program_id(0)
    num_rows = 1 if IS_FIRST else TOPK
    num_before = 0 if IS_FIRST else TOPK + (level - 1) * TOPK * TOPK
    child = tl.arange(0, BLOCK)
    exists = child < num_rows * TOPK
    row = child // TOPK
    place = request * num_rows * TOPK + child
    token, score = _children(token_ids_ptr, logprobs_ptr, target_ids_ptr, place, exists)
    parent = tl.full([BLOCK], -1, tl.int64)
    rank = child  # the best children come first
    if not IS_FIRST:
        above = request * TOPK + row
        score *= tl.load(beam_scores_ptr + (level - 1) * fed_stride + above, mask=exists, other=0.0)
        numbers = fed_ptr + (_NUMBERS_AT * num_steps + level - 1) * fed_stride
        parent = tl.load(numbers + above, mask=exists, other=0)
        key = tl.where(score == score, score, float("inf"))  # as torch sorts what is no number
        key = tl.where(exists, key, -1.0)
        rank = _num_before(key, child, key, child)

    if tl.program_id(1) == 0:
        found = request * num_found + num_before + child
        tl.store(found_ids_ptr + found, token, mask=exists)
        tl.store(found_scores_ptr + found, score, mask=exists)
        tl.store(found_parents_ptr + found, parent.to(tl.int32), mask=exists)
        if HAS_NEXT:
            is_fed = exists & (rank < TOPK)
            _write_step(
                fed_ptr, beam_scores_ptr, token, score, num_before + child, row, rank, is_fed,
                request, level, num_steps, fed_stride, TOPK, IS_FIRST, BLOCK,
            )  # fmt: skip
            _write_places(
                starts_ptr, rows_ptr, slots_ptr, kv_lens_ptr, table_ptr, fed_ptr, rank, is_fed,
                request, level, num_steps, fed_stride, table_width, TOPK,
            )  # fmt: skip
    if HAS_NEXT:
        _copy_hidden(
            hidden_ptr, hidden_out_ptr, rank, row, exists, request, num_rows, hidden_size,
            hidden_stride, TOPK, BLOCK_ROWS, BLOCK_HIDDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_found", "num_drafts", "early"])
def best_kernel(
    found_ids_ptr, found_scores_ptr, found_parents_ptr, ids_ptr, parents_ptr, scores_ptr,
    num_found, num_drafts,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, blocks of nodes). What was found is [R, num_found], the results are [R,
    num_drafts]: int64, int32, float32. A node's place is how many come before it, its parent's
    likewise, so no program needs what another finds."""
    begin(PDL, early)
    own = tl.program_id(0) * num_found
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = node < num_found
    score = _clean(tl.load(found_scores_ptr + own + node, mask=exists, other=0.0))
    parent = tl.load(found_parents_ptr + own + node, mask=exists, other=-1)
    above = tl.maximum(parent, 0)
    above_score = _clean(tl.load(found_scores_ptr + own + above))
    place = tl.zeros([BLOCK], tl.int32)
    above_place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_found, CHUNK):
        other = first + tl.arange(0, CHUNK)
        scores = tl.load(found_scores_ptr + own + other, mask=other < num_found, other=-1.0)
        scores = _clean(scores)
        place += _num_before(scores, other, score, node)
        above_place += _num_before(scores, other, above_score, above)
    is_best = exists & (place < num_drafts)
    out = tl.program_id(0) * num_drafts + place
    token = tl.load(found_ids_ptr + own + node, mask=exists, other=0)
    tl.store(ids_ptr + out, token, mask=is_best)
    tl.store(parents_ptr + out, tl.where(parent < 0, 0, 1 + above_place), mask=is_best)
    tl.store(scores_ptr + out, score, mask=is_best)


def triton_tree_search(
    shape: TreeShape, table: torch.Tensor, target_ids: torch.Tensor | None, first: ForwardBatch
) -> TreeSearch:
    """Makes a search by Triton, or by torch where beams are too wide for that."""
    kind = TorchTreeSearch if shape.topk > MOST_TOPK else TritonTreeSearch
    return kind(shape, table, target_ids, first)


class TritonTreeSearch:
    """See `TreeSearch`."""

    def __init__(
        self,
        shape: TreeShape,
        table: torch.Tensor,
        target_ids: torch.Tensor | None,
        first: ForwardBatch,
    ) -> None:
        assert shape.topk <= MOST_TOPK, shape
        self._shape = shape
        self._table = table
        self._target_ids = target_ids
        self._first = first
        self._level = 0
        device, count = table.device, len(first.positions)
        found = count, shape.num_found
        self._found = (
            torch.empty(found, dtype=torch.int64, device=device),
            torch.empty(found, dtype=torch.float32, device=device),
            torch.empty(found, dtype=torch.int32, device=device),
        )
        # Each step's numbers begin at a multiple of 16 bytes, which kernels are compiled for.
        steps, stride = shape.num_steps, count * shape.topk + count * shape.topk % 2
        self._fed = torch.empty((6, steps, stride), dtype=torch.int64, device=device)
        self._beam_scores = torch.empty((steps, stride), dtype=torch.float32, device=device)

    def grow(
        self, token_ids: torch.Tensor, logprobs: torch.Tensor, hidden: torch.Tensor
    ) -> ForwardBatch | None:
        first, topk, level = self._first, self._shape.topk, self._level
        num_rows, width = len(first.positions) * topk, hidden.shape[1]
        is_last = level == self._shape.num_steps
        fed_hidden = None if is_last else hidden.new_empty((num_rows, width))
        self._launch_grow(token_ids, logprobs, hidden, fed_hidden)
        self._level += 1
        if is_last:
            return None
        fed, end = self._fed[:, level, :num_rows], (level + 1) * topk
        return replace(
            first,
            input_ids=fed[_TOKENS],
            positions=fed[_POSITIONS],
            slots=fed[_SLOTS],
            q_lens=[topk] * len(first.q_lens),
            kv_lens=fed[_KV_LENS, : len(first.positions)],
            kv_len_upper_bounds=[bound + end - 1 for bound in first.kv_len_upper_bounds],
            ancestors=fed[_ANCESTORS],
            tree_starts=first.positions,
            hidden=fed_hidden,
        )

    def _launch_grow(
        self,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
        hidden: torch.Tensor,
        fed_hidden: torch.Tensor | None,
    ) -> None:
        shape, first, table = self._shape, self._first, self._table
        count, topk, width = len(first.positions), shape.topk, hidden.shape[1]
        assert hidden.stride(1) == 1
        block = max(2, triton.next_power_of_2(topk if self._level == 0 else topk**2))
        num_blocks = 1 if fed_hidden is None else triton.cdiv(width, _HIDDEN_BLOCK)
        grow_kernel[(count, num_blocks)](
            token_ids, logprobs, self._target_ids, hidden,
            first.positions, first.rows, first.slots, first.kv_lens, table,
            *self._found, self._fed, self._beam_scores, fed_hidden,
            self._level, shape.num_steps, shape.num_found, self._fed.shape[2], table.shape[1],
            width, hidden.stride(0),
            TOPK=topk, IS_FIRST=self._level == 0, HAS_NEXT=fed_hidden is not None, BLOCK=block,
            BLOCK_ROWS=max(2, triton.next_power_of_2(topk)), BLOCK_HIDDEN=_HIDDEN_BLOCK,
            num_warps=warps_of_beams(block), **dependent_launch(table.device, count * num_blocks),
        )  # fmt: skip

    def trees(self) -> DraftedTrees:
        count, topk, num_drafts = (
            len(self._first.positions),
            self._shape.topk,
            self._shape.num_drafts,
        )
        device = self._table.device
        ids = torch.empty((count, num_drafts), dtype=torch.int64, device=device)
        parents = torch.empty((count, num_drafts), dtype=torch.int32, device=device)
        scores = torch.empty((count, num_drafts), dtype=torch.float32, device=device)
        num_blocks = triton.cdiv(self._shape.num_found, BEST_BLOCK)
        best_kernel[(count, num_blocks)](
            *self._found, ids, parents, scores, self._shape.num_found, num_drafts,
            BLOCK=BEST_BLOCK, CHUNK=_BEST_CHUNK, **dependent_launch(device, count * num_blocks),
        )  # fmt: skip
        fed = self._fed[:, :, : count * topk].unflatten(2, (count, topk))
        return DraftedTrees(ids, parents, scores, fed[_TOKENS], fed[_ANCESTORS], fed[_SLOTS])


def warps_of_beams(num_children: int) -> int:
    """Returns the warps of a program that compares `num_children` nodes with each other."""
    return 4 if num_children <= 64 else num_children // 16
