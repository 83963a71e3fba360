"""Triton kernels of paged attention, and what launches them.

A step is cut into work items: up to BLOCK_M // group consecutive query rows of one request, where
the `group` query heads that share a KV head are laid out as further rows. The KV of a request is
found through its row of the page table, one slot per token. All lengths are read on the device.

An item is four int32: request, first token among the T of the step, number of query rows (0: an
empty item, which keeps a grid at a fixed size), and the rows from its first row to the end of the
request, so that its first row stands at position kv_len - rows_to_end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import Neighbours, begin, dependent_launch, finish

ITEM_SIZE = 4
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes of an attention kernel; both blocks are powers of two, 16 at least (tl.dot)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """Where a step's KV lies.

    Attributes:
        table: [num_rows, width] int32; slot of each token of each row.
        rows: [>= R] int64; row of each request of the step.
        kv_lens: [>= R] int64.
    """

    table: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor


@triton.jit
def _load_item(items_ptr, rows_ptr, kv_lens_ptr, index):
    """Row of the table, first token, number of query rows, position of the first (all scalars)."""
    item = items_ptr + index * 4
    request = tl.load(item)
    first_token = tl.load(item + 1).to(tl.int64)
    num_rows = tl.load(item + 2)
    table_row = tl.load(rows_ptr + request)
    position = tl.load(kv_lens_ptr + request).to(tl.int32) - tl.load(item + 3)
    return table_row, first_token, num_rows, position


@triton.jit
def _seen_range(position, num_rows, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """KV positions that an item's rows see: the first (down to a tile), the end, and the end of
    those tiles that every row sees whole (none with a window)."""
    end = position + num_rows
    if HAS_WINDOW:
        start = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        whole_end = start
    else:
        start = position * 0
        whole_end = tl.maximum(position + 1, 0) // BLOCK_N * BLOCK_N
    return start, end, whole_end


@triton.jit
def _split_len(start, end, num_splits, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """KV positions of each split but the last one: whole tiles."""
    tiles = tl.cdiv(tl.cdiv(end - start, num_splits), BLOCK_N)
    return tl.maximum(tiles * BLOCK_N, MIN_SPLIT)


@triton.jit
def _packed_offsets(
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
def _packed_mask(
    num_rows, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_D] bool: what `_packed_offsets` names exists."""
    row = tl.arange(0, BLOCK_M)
    return (row // GROUP < num_rows)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]


@triton.jit
def _attend_tiles(
    q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, position, start, end, window, scale,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Goes over the KV positions start..end in tiles; the running softmax of each packed row.

    Args:
        q: [BLOCK_M, BLOCK_D].
        acc: [BLOCK_M, BLOCK_D] float32, sum of weighted V.
        top: [BLOCK_M] float32, the highest score (of base 2) so far.
        total: [BLOCK_M] float32, sum of weights.
        position: [BLOCK_M] int32, of each packed row.
        MASKED: a tile may reach past `end` or hold what some row does not see.
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
            k = tl.load(address)
            v = tl.load(address + v_offset)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = (place[None, :] <= position[:, None]) & (place < end)[None, :]
            if HAS_WINDOW:
                seen = seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _attend_range(
    q_ptr, kv_ptr, table_ptr, table_row, first_token, num_rows, position, start, end, whole_end,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) of `_attend_tiles` for an item's rows over the KV positions start..end, the
    tiles before `whole_end` without masks."""
    kv_index = tl.program_id(1)
    offsets = _packed_offsets(
        first_token, kv_index, q_token, q_head, GROUP, BLOCK_M, BLOCK_D
    )  # fmt: skip
    exists = _packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    q = tl.load(q_ptr + offsets, mask=exists, other=0.0)
    positions = position + tl.arange(0, BLOCK_M) // GROUP
    kv_base = kv_ptr + kv_index * kv_head
    slots_base = table_ptr + table_row * table_width
    v_offset = NUM_KV_HEADS * kv_head
    # Finite, so that a row that has seen nothing yet is scaled by exp2(0), never by exp2(nan).
    top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if not HAS_WINDOW:
        acc, top, total = _attend_tiles(
            q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, positions,
            start, tl.minimum(end, whole_end), window, scale,
            False, False, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, top, total = _attend_tiles(
        q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, positions,
        tl.maximum(start, whole_end), end, window, scale,
        True, HAS_WINDOW, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend_item(
    index, q_ptr, kv_ptr, out_ptr, items_ptr, table_ptr, rows_ptr, kv_lens_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Goes over all the KV that an item sees, and writes its result."""
    table_row, first_token, num_rows, position = _load_item(items_ptr, rows_ptr, kv_lens_ptr, index)
    if num_rows > 0:
        start, end, whole_end = _seen_range(position, num_rows, window, HAS_WINDOW, BLOCK_N)
        acc, _, total = _attend_range(
            q_ptr, kv_ptr, table_ptr, table_row, first_token, num_rows, position,
            start, end, whole_end,
            q_token, q_head, kv_slot, kv_head, table_width, window, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        offsets = _packed_offsets(
            first_token, tl.program_id(1), NUM_KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM,
            GROUP, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        exists = _packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["window", "num_items", "early", "beside"])
def _extend_kernel(
    q_ptr, kv_ptr, out_ptr, items_ptr, table_ptr, rows_ptr, kv_lens_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale, num_items,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LOOPS: tl.constexpr, PDL: tl.constexpr, early, beside,
):  # fmt: skip
    """Grid (items, KV heads), or if it `LOOPS`, fewer programs, each for every so many items."""
    begin(PDL, early, beside)
    if LOOPS:
        for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
            _attend_item(
                index, q_ptr, kv_ptr, out_ptr, items_ptr, table_ptr, rows_ptr, kv_lens_ptr,
                q_token, q_head, kv_slot, kv_head, table_width, window, scale,
                NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    else:
        _attend_item(
            tl.program_id(0), q_ptr, kv_ptr, out_ptr, items_ptr, table_ptr, rows_ptr, kv_lens_ptr,
            q_token, q_head, kv_slot, kv_head, table_width, window, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    finish(PDL, beside)


@triton.jit(do_not_specialize=["window", "early", "beside"])
def _split_kernel(
    q_ptr, kv_ptr, sums_ptr, stats_ptr, items_ptr, table_ptr, rows_ptr, kv_lens_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_SPLIT: tl.constexpr, PDL: tl.constexpr, early, beside,
):  # fmt: skip
    """Grid (items, KV heads, splits): a program goes over its share of the item's KV, and leaves
    acc, top and total in the workspace; one without a share leaves nothing."""
    begin(PDL, early, beside)
    table_row, first_token, num_rows, position = _load_item(
        items_ptr, rows_ptr, kv_lens_ptr, tl.program_id(0)
    )
    if num_rows == 0:
        finish(PDL, beside)
        return
    start, end, whole_end = _seen_range(position, num_rows, window, HAS_WINDOW, BLOCK_N)
    length = _split_len(start, end, tl.num_programs(2), BLOCK_N, MIN_SPLIT)
    start = start + tl.program_id(2) * length
    if start >= end:
        finish(PDL, beside)
        return
    end = tl.minimum(start + length, end)
    acc, top, total = _attend_range(
        q_ptr, kv_ptr, table_ptr, table_row, first_token, num_rows, position,
        start, end, whole_end,
        q_token, q_head, kv_slot, kv_head, table_width, window, scale,
        NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    part = tl.program_id(0) * NUM_KV_HEADS + tl.program_id(1)
    part = (part * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
    row = part * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    exists = _packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    tl.store(sums_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=exists)
    tl.store(stats_ptr + row * 2, top)
    tl.store(stats_ptr + row * 2 + 1, total)
    finish(PDL, beside)


@triton.jit(do_not_specialize=["window", "num_splits", "early"])
def _combine_kernel(
    sums_ptr, stats_ptr, out_ptr, items_ptr, rows_ptr, kv_lens_ptr, window, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (items, KV heads, packed rows): adds up the splits of one row."""
    begin(PDL, early)
    _, first_token, num_rows, position = _load_item(
        items_ptr, rows_ptr, kv_lens_ptr, tl.program_id(0)
    )
    packed = tl.program_id(2)
    if packed // GROUP >= num_rows:
        return
    start, end, _ = _seen_range(position, num_rows, window, HAS_WINDOW, BLOCK_N)
    length = _split_len(start, end, num_splits, BLOCK_N, MIN_SPLIT)
    split = tl.arange(0, BLOCK_S)
    used = (split < num_splits) & (start + split * length < end)
    kv_index = tl.program_id(1)
    part = (tl.program_id(0) * NUM_KV_HEADS + kv_index).to(tl.int64) * num_splits + split
    row = part * BLOCK_M + packed
    top = tl.load(stats_ptr + row * 2, mask=used, other=-1e30)
    total = tl.load(stats_ptr + row * 2 + 1, mask=used, other=0.0)
    dim = tl.arange(0, BLOCK_D)
    exists = used[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.load(sums_ptr + row[:, None] * HEAD_DIM + dim[None, :], mask=exists, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    whole = tl.sum(total * weight, 0)
    out = tl.sum(sums * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    head = kv_index * GROUP + packed % GROUP
    place = (first_token + packed // GROUP) * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
    tl.store(out_ptr + place + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def _constants(
    q: torch.Tensor, kv: torch.Tensor, window: int | None, tiles: Tiles
) -> dict[str, int | bool]:
    """What every attention kernel knows when it is compiled."""
    num_kv_heads, head_dim = kv.shape[1] // 2, kv.shape[2]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": window is not None,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
    }


def attend_items(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor,
    items: torch.Tensor, paged: Paged, window: int | None, tiles: Tiles, launch: Neighbours,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Attention of `items` [I, 4] int32.

    Args:
        q: [T, num_heads, head_dim], any strides but the last.
        kv: [num_slots, 2 * num_kv_heads, head_dim].
        out: [T, num_heads * head_dim] contiguous; the items' rows are written.
        num_programs: for each KV head, at most, which take turns; by default one for each item.
    """
    constants = _constants(q, kv, window, tiles)
    programs = min(num_programs or len(items), len(items))
    _extend_kernel[(programs, kv.shape[1] // 2)](
        q, kv, out, items, paged.table, paged.rows, paged.kv_lens,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        window or 0, kv.shape[2] ** -0.5 * LOG2_E, len(items),
        **constants, LOOPS=num_programs is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch.options(q.device, programs * constants["NUM_KV_HEADS"]),
    )  # fmt: skip


def attend_items_split(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, tiles: Tiles, launch: Neighbours,
    num_splits: int, min_split: int, workspace: torch.Tensor,
) -> None:  # fmt: skip
    """As `attend_items`, with the KV of each item shared out among up to `num_splits` programs.

    Args:
        min_split: a program takes no fewer KV positions, but the last; a multiple of block_n.
        workspace: float32, `workspace_size` elements at least; of block_m packed rows.
    """
    constants = _constants(q, kv, window, tiles)
    num_kv_heads, head_dim = kv.shape[1] // 2, kv.shape[2]
    num_rows = len(items) * num_kv_heads * num_splits * tiles.block_m
    stats, sums = workspace[: 2 * num_rows], workspace[2 * num_rows :]
    _split_kernel[(len(items), num_kv_heads, num_splits)](
        q, kv, sums, stats, items, paged.table, paged.rows, paged.kv_lens,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        window or 0, head_dim**-0.5 * LOG2_E,
        **constants, MIN_SPLIT=min_split, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch.options(q.device, len(items) * num_kv_heads * num_splits),
    )  # fmt: skip
    group = q.shape[1] // num_kv_heads
    block_s = next(size for size in (8, 32, 64) if num_splits <= size)  # each is compiled anew
    _combine_kernel[(len(items), num_kv_heads, tiles.block_m // group * group)](
        sums, stats, out, items, paged.rows, paged.kv_lens, window or 0, num_splits,
        **constants, MIN_SPLIT=min_split, BLOCK_S=block_s, num_warps=1 if block_s <= 32 else 4,
        **dependent_launch(q.device, len(items) * num_kv_heads * tiles.block_m),
    )  # fmt: skip


def workspace_size(num_programs: int, block_m: int, head_dim: int) -> int:
    """Elements that `attend_items_split` needs for a grid of `num_programs`."""
    return num_programs * block_m * (head_dim + 2)
