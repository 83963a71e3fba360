"""Adds up the results of several programs for an item, each over its share of the KV."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.items import load_item, seen_range, split_len
from sglang.srt.layers.attention.triton_ops.kernels import (
    OFTEN_SLICES,
    SPLITS,
    Paged,
    Tiles,
    constants_of,
    stats_and_sums,
)
from sglang.srt.layers.triton_launch import begin, dependent_launch

# Programs that add up splits where the device knows how many there are, of each KV head.
_SUM_ITEMS, _SUM_ROWS = 4, 64


@triton.jit
def _add_up_row(
    index, packed, num_splits, first_token, start, end, sums_ptr, stats_ptr, out_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of a packed row of an item that sees the KV positions start..end."""
    length = split_len(start, end, num_splits, BLOCK_N)
    split = tl.arange(0, BLOCK_S)
    used = (split < num_splits) & (start + split * length < end)
    kv_index = tl.program_id(1)
    part = (index * NUM_KV_HEADS + kv_index).to(tl.int64) * num_splits + split
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


@triton.jit
def _add_up_item(
    index, num_splits, sums_ptr, stats_ptr, out_ptr, items_ptr, rows_ptr, kv_lens_ptr,
    kv_starts_ptr, q_starts_ptr, tree_starts_ptr, window,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, ITEM_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    LOOPS: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one packed row of an item, if it is there; or of several."""
    _, _, first_token, num_rows, position, tree_start = load_item(
        items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr, index,
        HAS_TREE, ITEM_SIZE,
    )  # fmt: skip
    start, end, _ = seen_range(
        position, num_rows, tree_start, window, HAS_WINDOW, HAS_TREE, BLOCK_N
    )
    if LOOPS:
        for packed in range(tl.program_id(2), num_rows * GROUP, tl.num_programs(2)):
            _add_up_row(
                index, packed, num_splits, first_token, start, end, sums_ptr, stats_ptr, out_ptr,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_S,
            )  # fmt: skip
    elif tl.program_id(2) < num_rows * GROUP:
        _add_up_row(
            index, tl.program_id(2), num_splits, first_token, start, end, sums_ptr, stats_ptr,
            out_ptr, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_S,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*OFTEN_SLICES[1:], *SPLITS, "window", "early"])
def _combine_kernel(
    sums_ptr, stats_ptr, out_ptr, items_ptr, splits_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr,
    q_starts_ptr, tree_starts_ptr, window, num_items, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, ITEM_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (items, KV heads, packed rows): adds up the splits of one row. With `splits_ptr` the
    device knows the number of splits and the grid is smaller: a program takes several rows of
    several items, or none if there is one split, whose program has written the result."""
    begin(PDL, early)
    if splits_ptr is not None:
        num_splits = tl.load(splits_ptr)
        if num_splits > 1:
            for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
                _add_up_item(
                    index, num_splits, sums_ptr, stats_ptr, out_ptr, items_ptr, rows_ptr,
                    kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr, window,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, ITEM_SIZE,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_S, True,
                )  # fmt: skip
    else:
        _add_up_item(
            tl.program_id(0), num_splits, sums_ptr, stats_ptr, out_ptr, items_ptr, rows_ptr,
            kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr, window,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, ITEM_SIZE,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_S, False,
        )  # fmt: skip


def add_up_splits(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, tiles: Tiles, num_splits: int, workspace: torch.Tensor,
    device_splits: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the items' rows of `out`, after `attend_items_split` of the same arguments.

    Args:
        items: [I, 4 or more] int32.
        device_splits: [1] int32, the number of splits, `num_splits` at most; None: these are they.
    """
    constants = constants_of(q, kv, window, tiles)
    num_kv_heads = kv.shape[1] // 2
    stats, sums = stats_and_sums(workspace, tiles.block_m, kv.shape[2])
    group = q.shape[1] // num_kv_heads
    has_tree = paged.ancestors is not None and window is not None  # else it changes no split
    block_s = next(size for size in (8, 32, 64) if num_splits <= size)  # each is compiled anew
    grid = (len(items), num_kv_heads, tiles.block_m // group * group)
    if device_splits is not None:
        grid = (min(len(items), _SUM_ITEMS), num_kv_heads, _SUM_ROWS)
    _combine_kernel[grid](
        sums, stats, out, items, device_splits, paged.rows, paged.kv_lens, paged.kv_starts,
        paged.q_starts, paged.tree_starts if has_tree else None, window or 0, len(items),
        num_splits, **constants, HAS_TREE=has_tree, ITEM_SIZE=items.shape[1], BLOCK_S=block_s,
        num_warps=1 if block_s <= 32 else 4,
        **dependent_launch(q.device, grid[0] * grid[1] * grid[2]),
    )  # fmt: skip
