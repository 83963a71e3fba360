"""The rows of a step, laid out by one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, report_outside
from sglang.srt.step import step_ops

_Q_LEN = tl.constexpr(step_ops.Q_LEN)
_Q_START = tl.constexpr(step_ops.Q_START)
_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)
_NUM_READ = tl.constexpr(step_ops.NUM_READ)
_READ_START = tl.constexpr(step_ops.READ_START)
_EMITS_ONLY_CONFIRMED = tl.constexpr(step_ops.EMITS_ONLY_CONFIRMED)


@triton.jit
def _token_and_slot(
    token_table_ptr, table_ptr, outside_ptr, row, column, fed, is_known, table_width
):  # fmt: skip
    """Reads token and slot of a row from the two tables, int64: 0 outside of the tables' row, and
    token 0 if it is not known."""
    is_inside = (column >= 0) & (column < table_width)
    report_outside(outside_ptr, column, fed & ~is_inside)
    place = row * table_width + column
    token = tl.load(token_table_ptr + place, mask=fed & is_known & is_inside, other=0)
    slot = tl.load(table_ptr + place, mask=fed & is_inside, other=0)
    return token.to(tl.int64), slot.to(tl.int64)


@triton.jit
def _tree_depth(
    parents_ptr, depths_ptr, ancestors_ptr, row_parents_ptr, row_ancestors_ptr,
    row, offset, start, q_len, num_nodes, tree_width,
):  # fmt: skip
    """Writes the tree fields of `LookaheadLayout`; returns the number of nodes above each of a
    request's first `num_nodes` rows, and the offset of the others."""
    is_node = offset < num_nodes
    fed = offset < q_len
    node = row * tree_width + offset
    parent = tl.load(parents_ptr + node, mask=is_node, other=-1)
    tl.store(row_parents_ptr + start + offset, parent, mask=fed)
    seen = tl.load(ancestors_ptr + node, mask=is_node, other=-1)
    tl.store(row_ancestors_ptr + start + offset, seen, mask=fed)
    return tl.where(is_node, tl.load(depths_ptr + node, mask=is_node, other=0), offset)


@triton.jit
def _store_reads(own, reads_ptr, read_stride, num_reqs, request, row, offset, index, position):
    """Stores a request's part of `ReadRows`; index and position of its rows read."""
    is_read = offset < tl.load(own + _NUM_READ * num_reqs)
    read = reads_ptr + tl.load(own + _READ_START * num_reqs) + offset
    tl.store(read, offset * 0 + request, mask=is_read)
    tl.store(read + read_stride, offset, mask=is_read)
    tl.store(read + 2 * read_stride, index, mask=is_read)
    tl.store(read + 3 * read_stride, position, mask=is_read)
    tl.store(read + 4 * read_stride, offset * 0 + row, mask=is_read)


@triton.jit(
    do_not_specialize=["num_reqs", "token_stride", "read_stride", "lookahead_token", "early"]
)
def lay_out_kernel(
    packed_ptr, committed_ptr, pending_lens_ptr, token_table_ptr, table_ptr, outside_ptr,
    parents_ptr, depths_ptr, ancestors_ptr,
    tokens_ptr, kv_lens_ptr, reads_ptr,
    q_starts_ptr, num_pending_ptr, row_parents_ptr, row_ancestors_ptr,
    num_reqs, token_stride, read_stride, table_width, lookahead_token, tree_width,
    HAS_LOOKAHEAD: tl.constexpr, HAS_TREE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, blocks of rows): see `RowLayout`, `ReadRows` and, if it HAS_LOOKAHEAD,
    `LookaheadLayout`. A column outside of its row of the tables gives token 0 and the dummy slot.
    `packed_ptr`: see `pack_for_device`; `token_table_ptr` and `table_ptr` are [N, table_width]
    int32, `tokens_ptr` [3, token_stride]: input ids, positions, slots; `reads_ptr` [5,
    read_stride]: the fields of `ReadRows`."""
    begin(PDL, early)
    request = tl.program_id(0)
    own = packed_ptr + request
    q_len = tl.load(own + _Q_LEN * num_reqs)
    row = tl.load(own)
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs)
    committed = tl.load(committed_ptr + row)
    pending_len = tl.load(pending_lens_ptr + row)
    start = tl.load(own + _Q_START * num_reqs)
    only_confirmed = tl.load(own + _EMITS_ONLY_CONFIRMED * num_reqs) != 0
    if tl.program_id(1) == 0:
        tl.store(kv_lens_ptr + request, committed + q_len)
        if HAS_LOOKAHEAD:
            num_pending = tl.where((num_prompt == 0) & only_confirmed, pending_len, 1)
            tl.store(num_pending_ptr + request, tl.minimum(num_pending, q_len))
            tl.store(q_starts_ptr + request, start)
            tl.store(q_starts_ptr + num_reqs, start + q_len, mask=request == num_reqs - 1)
    if tl.program_id(1) * BLOCK >= q_len:
        return

    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fed = offset < q_len
    column = committed + offset
    is_known = offset < tl.where(num_prompt > 0, num_prompt, pending_len)
    token, slot = _token_and_slot(
        token_table_ptr, table_ptr, outside_ptr, row, column, fed, is_known, table_width
    )  # fmt: skip
    first = tl.where(only_confirmed, 0, pending_len - 1)
    first = tl.where(num_prompt > 0, num_prompt - 1, first)
    position, predicted = column, column + first + 1
    if HAS_TREE:  # all rows of a tree are read, so offsets among rows read are those among rows
        num_nodes = tl.where(num_prompt > 0, 0, tl.minimum(pending_len, q_len))
        depth = _tree_depth(
            parents_ptr, depths_ptr, ancestors_ptr, row_parents_ptr, row_ancestors_ptr,
            row, offset, start, q_len, num_nodes, tree_width,
        )  # fmt: skip
        position = committed + depth
        predicted = tl.where(offset < num_nodes, position + 1, predicted)
    out = tokens_ptr + start + offset
    tl.store(out, tl.where(is_known, token, lookahead_token), mask=fed)
    tl.store(out + token_stride, position, mask=fed)
    tl.store(out + 2 * token_stride, slot, mask=fed)
    index = start + first + offset
    _store_reads(own, reads_ptr, read_stride, num_reqs, request, row, offset, index, predicted)
