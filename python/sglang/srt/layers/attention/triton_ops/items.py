"""Work items of paged attention, and how a program goes over the KV that one sees.

A step is cut into work items: up to BLOCK_M // group consecutive query rows of one request, where
the `group` query heads that share a KV head are laid out as further rows. The KV of a request is
found through its row of the page table, one slot per token. All lengths are read on the device.

An item is four int32: request, first token among the T of the step, number of query rows (0: an
empty item, which keeps a grid at a fixed size) with the index of its first row within the request
(`pack_rows`), and the rows from its first row to the end of the request, so that its first row
stands at position kv_len - rows_to_end. In a packed batch (`q_starts_ptr` is not None) the device
knows these numbers better: the item has those of its rows that exist, and is empty if none does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.layers.triton_launch import report_outside

ITEM_SIZE = 4
_MAX_TREE_ROWS = tl.constexpr(MAX_TREE_ROWS)


def pack_rows(num_rows: int, index: int) -> int:
    """The third number of an item; num_rows < 2**8, index < 2**23."""
    return num_rows | index << 8


@triton.jit
def first_kv(kv_starts_ptr, table_row):
    """Column of the first KV of a row of the table that is seen; `kv_starts_ptr` may be None."""
    if kv_starts_ptr is not None:
        return tl.load(kv_starts_ptr + table_row).to(tl.int32)
    else:
        return 0


@triton.jit
def load_item(
    items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr, index,
    HAS_TREE: tl.constexpr, ITEM_SIZE: tl.constexpr = 4,
):  # fmt: skip
    """Row of the table, the column in it of the first KV that is seen, first token, number of query
    rows, position of the first one, and the position where the request's tree starts (where its KV
    ends if it has none). All are scalars, and positions count from that column on. The pointers to
    starts may be None."""
    item = items_ptr + index * ITEM_SIZE
    request = tl.load(item)
    packed = tl.load(item + 2)
    num_rows, first_row = packed & 255, packed >> 8
    if q_starts_ptr is not None:
        first_token = tl.load(q_starts_ptr + request) + first_row
        rows_to_end = (tl.load(q_starts_ptr + request + 1) - first_token).to(tl.int32)
        num_rows = tl.maximum(tl.minimum(num_rows, rows_to_end), 0)
    else:
        first_token = tl.load(item + 1).to(tl.int64)
        rows_to_end = tl.load(item + 3)
    table_row = tl.load(rows_ptr + request)
    kv_start = first_kv(kv_starts_ptr, table_row)
    kv_len = tl.load(kv_lens_ptr + request).to(tl.int32) - kv_start
    position = kv_len - rows_to_end
    tree_start = kv_len
    if HAS_TREE:
        if tree_starts_ptr is not None:
            start = tl.load(tree_starts_ptr + request).to(tl.int32) - kv_start
        else:
            start = position - first_row
        tree_start = tl.where(kv_len - start <= _MAX_TREE_ROWS, start, kv_len)
    return table_row, kv_start, first_token, num_rows, position, tree_start


@triton.jit
def seen_range(
    position, num_rows, tree_start, window,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """KV positions that an item's rows see: the first (rounded down to a tile), the end, and the
    end of the tiles that every row sees whole (with a window there are none)."""
    end = position + num_rows
    last_common = position  # all rows see it, windows aside, and no row's depth is less
    if HAS_TREE:
        last_common = tl.minimum(position, tree_start - 1)
    if HAS_WINDOW:
        start = tl.maximum(last_common - window + 1, 0) // BLOCK_N * BLOCK_N
        whole_end = start
    else:
        start = position * 0
        whole_end = tl.maximum(last_common + 1, 0) // BLOCK_N * BLOCK_N
    return start, end, whole_end


@triton.jit
def _within_window(ancestors, positions, tree_start, window):
    """Depth of rows that may be in a tree, and their ancestors less those that are `window` or more
    rows back.

    Args:
        ancestors: [BLOCK_M] int64.
        positions: [BLOCK_M] int32, of the rows' own KV.

    Returns:
        [BLOCK_M] int32 and int64.
    """
    bit = tl.arange(0, _MAX_TREE_ROWS)
    seen = (ancestors[:, None] >> bit[None, :]) & 1 != 0
    seen = seen & (tree_start + bit[None, :] <= positions[:, None])
    num_seen = tl.sum(seen.to(tl.int32), 1)
    depth = tl.minimum(positions, tree_start - 1) + num_seen
    for _ in range(window, tl.max(num_seen, 0)):
        ancestors = tl.where(num_seen > window, ancestors & (ancestors - 1), ancestors)
        num_seen = num_seen - 1
    return depth, ancestors


@triton.jit
def split_len(start, end, num_splits, BLOCK_N: tl.constexpr):
    """KV positions of each split but the last one: whole tiles, one at least."""
    tiles = tl.cdiv(tl.cdiv(end - start, num_splits), BLOCK_N)
    return tl.maximum(tiles, 1) * BLOCK_N


@triton.jit
def packed_offsets(
    first_token, kv_index, token_stride, head_stride, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Offsets [BLOCK_M, BLOCK_D] of an item's rows in a [T, num_heads, head_dim] tensor: the query
    row changes slowest, then the head of the group."""
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    head = kv_index * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    return (token * token_stride + head * head_stride)[:, None] + dim[None, :]


@triton.jit
def packed_mask(
    num_rows, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_D] bool: what `packed_offsets` names exists."""
    row = tl.arange(0, BLOCK_M)
    return (row // GROUP < num_rows)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]


@triton.jit
def attend_tiles(
    q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, position, depth, ancestors,
    tree_start, start, end, window, scale,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Goes over the KV positions start..end in tiles; the running softmax of each packed row.

    Args:
        q: [BLOCK_M, BLOCK_D].
        acc: [BLOCK_M, BLOCK_D] float32, sum of weighted V.
        top: [BLOCK_M] float32, the highest score (of base 2) so far.
        total: [BLOCK_M] float32, sum of weights.
        position: [BLOCK_M] int32, of each packed row.
        depth: [BLOCK_M] int32; the row's position less the rows before it that it does not see.
        ancestors: [BLOCK_M] int64, if it HAS_TREE; bit 0 is of position `tree_start`.
        MASKED: a tile may reach past `end` or hold what some row does not see.
        SOFTCAP: of scores of base 2; 0 for none.
    """
    dim = tl.arange(0, BLOCK_D)
    for tile in range(start, end, BLOCK_N):
        place = tile + tl.arange(0, BLOCK_N)
        if MASKED:
            slots = tl.load(slots_base + place, mask=place < end, other=0).to(tl.int64)
        else:
            slots = tl.load(slots_base + place).to(tl.int64)
        address = kv_base + (slots * kv_slot)[:, None] + dim[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            exists = (place < end)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(address, mask=exists, other=0.0)
            v = tl.load(address + v_offset, mask=exists, other=0.0)
        else:
            k, v = tl.load(address), tl.load(address + v_offset)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # scaled once they are masked
        if SOFTCAP > 0:  # times a hyperbolic tangent
            scores = 1 - 2 / (1 + tl.exp(scores * (scale * (2 / SOFTCAP))))
        if MASKED:
            seen = (place[None, :] <= position[:, None]) & (place < end)[None, :]
            if HAS_WINDOW:
                near = place[None, :] > depth[:, None] - window
            if HAS_TREE:
                bit = tl.minimum(tl.maximum(place - tree_start, 0), _MAX_TREE_ROWS - 1)
                is_ancestor = (ancestors[:, None] >> bit[None, :]) & 1 != 0
                before = (place < tree_start)[None, :]
                if HAS_WINDOW:  # `ancestors` has only those that are near
                    seen = seen & tl.where(before, near, is_ancestor)
                else:
                    seen = seen & (before | is_ancestor)
            elif HAS_WINDOW:
                seen = seen & near
            scores = tl.where(seen, scores, float("-inf"))
        factor = SOFTCAP if SOFTCAP > 0 else scale
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def attend_range(
    q_ptr, kv_ptr, table_ptr, outside_ptr, ancestors_ptr, table_row, kv_start, first_token,
    num_rows, position, tree_start, start, end, whole_end,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) of `attend_tiles` for an item's rows over the KV positions start..end, the
    tiles before `whole_end` without masks. What is past the row of the table is not read."""
    width = table_width - kv_start
    report_outside(outside_ptr, end - 1 + kv_start, end > width)
    end = tl.minimum(end, width)
    whole_end = tl.minimum(whole_end, width // BLOCK_N * BLOCK_N)
    kv_index = tl.program_id(1)
    offsets = packed_offsets(
        first_token, kv_index, q_token, q_head, GROUP, BLOCK_M, BLOCK_D
    )  # fmt: skip
    exists = packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    q = tl.load(q_ptr + offsets, mask=exists, other=0.0)
    row = tl.arange(0, BLOCK_M) // GROUP
    positions = position + row
    depths, ancestors = positions, None
    if HAS_TREE:
        ancestors = tl.load(ancestors_ptr + first_token + row, mask=row < num_rows, other=0)
        if HAS_WINDOW:
            depths, ancestors = _within_window(ancestors, positions, tree_start, window)
    kv_base = kv_ptr + kv_index * kv_head
    slots_base = table_ptr + table_row * table_width + kv_start
    v_offset = NUM_KV_HEADS * kv_head
    # Finite, so that a row that has seen nothing yet is scaled by exp2(0), never by exp2(nan).
    top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if not HAS_WINDOW:
        acc, top, total = attend_tiles(
            q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, positions, depths,
            ancestors, tree_start, start, tl.minimum(end, whole_end), window, scale,
            False, False, False, HEAD_DIM, BLOCK_N, BLOCK_D, SOFTCAP,
        )  # fmt: skip
    acc, top, total = attend_tiles(
        q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, positions, depths,
        ancestors, tree_start, tl.maximum(start, whole_end), end, window, scale,
        True, HAS_WINDOW, HAS_TREE, HEAD_DIM, BLOCK_N, BLOCK_D, SOFTCAP,
    )  # fmt: skip
    return acc, top, total
