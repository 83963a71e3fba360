"""Triton kernels of paged attention over work items (`items.py`), and their launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.base_attn_backend import PLAIN, ScoreForm
from sglang.srt.layers.attention.triton_ops.items import (
    attend_range,
    load_item,
    packed_mask,
    packed_offsets,
    seen_range,
    split_len,
)
from sglang.srt.layers.triton_launch import ParallelLaunch, begin, finish

LOG2_E = 1.4426950408889634
# Maybe parts of other tensors: kernels are not compiled anew for addresses that 16 divides.
OFTEN_SLICES = ["ancestors_ptr", "q_starts_ptr", "tree_starts_ptr"]
SPLITS = ["splits_ptr", "num_items", "num_splits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes of an attention kernel; both blocks are powers of two, 16 at least (tl.dot)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """The place of a step's KV, the part of it that is seen, and the form of scores.

    Attributes:
        table: [num_rows, width] int32; slot of each token of each row.
        rows: [>= R] int64; row of each request of the step.
        kv_lens: [>= R] int64.
        kv_starts: [num_rows] int64, see `MHATokenToKVPool.kv_starts`; None: all KV is seen.
        ancestors: [T] int64, as in ForwardBatch; None where no request is a tree.
        tree_starts: [>= R] int64 or None, as there.
        q_starts: [> R] int64, of a packed batch; None of others.
        outside: as in ReqToTokenPool.
        scores: as in AttentionBackend.
    """

    table: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor
    kv_starts: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    tree_starts: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    outside: torch.Tensor | None = None
    scores: ScoreForm = PLAIN

    def scale_of(self, kv: torch.Tensor) -> float:
        """Returns the factor of scores of base 2. kv: [..., head_dim]."""
        return self.scores.scale_of(kv.shape[-1]) * LOG2_E

    @property
    def softcap(self) -> float:
        """Returns the bound of scores of base 2; 0 for none."""
        return (self.scores.softcap or 0.0) * LOG2_E


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares items out among programs where the device knows the number of splits.

    Attributes:
        num_splits: [1] int32, of the KV of each item; with several, `add_up_splits` makes the
            result of what they leave in the workspace.
        num_programs: of each KV head.
        workspace: float32, of as many programs as there are items times splits.
    """

    num_splits: torch.Tensor
    num_programs: int
    workspace: torch.Tensor


@triton.jit
def _leave_sums(
    index, split, num_splits, num_rows, acc, top, total, sums_ptr, stats_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores what a split's program has found of an item in the workspace."""
    part = index * NUM_KV_HEADS + tl.program_id(1)
    part = (part * num_splits + split).to(tl.int64)
    row = part * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    exists = packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    tl.store(sums_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=exists)
    tl.store(stats_ptr + row * 2, top)
    tl.store(stats_ptr + row * 2 + 1, total)


@triton.jit
def _attend_item(
    index, split, num_splits, q_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, items_ptr, table_ptr,
    outside_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, ancestors_ptr, q_starts_ptr, tree_starts_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
):  # fmt: skip
    """Goes over the KV that an item sees, or over the share of one of several splits, and writes
    the result, or leaves acc, top and total in the workspace."""
    table_row, kv_start, first_token, num_rows, position, tree_start = load_item(
        items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr, index,
        HAS_TREE,
    )  # fmt: skip
    start, end, whole_end = seen_range(
        position, num_rows, tree_start, window, HAS_WINDOW, HAS_TREE, BLOCK_N
    )
    if MAY_SPLIT:
        length = split_len(start, end, num_splits, BLOCK_N)
        start = start + split * length
        end = tl.minimum(start + length, end)
    if (num_rows > 0) & (start < end):
        acc, top, total = attend_range(
            q_ptr, kv_ptr, table_ptr, outside_ptr, ancestors_ptr, table_row, kv_start, first_token,
            num_rows, position, tree_start, start, end, whole_end,
            q_token, q_head, kv_slot, kv_head, table_width, window, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
        )  # fmt: skip
        if num_splits > 1:
            _leave_sums(
                index, split, num_splits, num_rows, acc, top, total, sums_ptr, stats_ptr,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        else:
            offsets = packed_offsets(
                first_token, tl.program_id(1), NUM_KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM,
                GROUP, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            out = acc / tl.where(total > 0, total, 1.0)[:, None]
            exists = packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
            tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=[*OFTEN_SLICES, *SPLITS, "window", "early", "beside"])
def _extend_kernel(
    q_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, items_ptr, splits_ptr, table_ptr, outside_ptr,
    rows_ptr, kv_lens_ptr, kv_starts_ptr, ancestors_ptr, q_starts_ptr, tree_starts_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale, num_items,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr, early, beside,
):  # fmt: skip
    """Grid (items, KV heads). With `splits_ptr` the device knows among how many programs the KV of
    each item is split, and each program takes several of these shares."""
    begin(PDL, early, beside)
    if splits_ptr is not None:
        num_splits = tl.load(splits_ptr)
        for share in range(tl.program_id(0), num_items * num_splits, tl.num_programs(0)):
            _attend_item(
                share // num_splits, share % num_splits, num_splits, q_ptr, kv_ptr, out_ptr,
                sums_ptr, stats_ptr, items_ptr, table_ptr, outside_ptr, rows_ptr, kv_lens_ptr,
                kv_starts_ptr, ancestors_ptr, q_starts_ptr, tree_starts_ptr,
                q_token, q_head, kv_slot, kv_head, table_width, window, scale,
                NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, BLOCK_M, BLOCK_N, BLOCK_D,
                SOFTCAP, True,
            )  # fmt: skip
    else:
        _attend_item(
            tl.program_id(0), 0, 1, q_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, items_ptr,
            table_ptr, outside_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, ancestors_ptr,
            q_starts_ptr, tree_starts_ptr,
            q_token, q_head, kv_slot, kv_head, table_width, window, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
            False,
        )  # fmt: skip
    finish(PDL, beside)


@triton.jit(do_not_specialize=[*OFTEN_SLICES, "window", "early", "beside"])
def _split_kernel(
    q_ptr, kv_ptr, sums_ptr, stats_ptr, items_ptr, table_ptr, outside_ptr, rows_ptr, kv_lens_ptr,
    kv_starts_ptr, ancestors_ptr, q_starts_ptr, tree_starts_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr, early, beside,
):  # fmt: skip
    """Grid (items, KV heads, splits): a program goes over its share of the item's KV, and leaves
    acc, top and total in the workspace; one without a share leaves nothing."""
    begin(PDL, early, beside)
    table_row, kv_start, first_token, num_rows, position, tree_start = load_item(
        items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, tree_starts_ptr,
        tl.program_id(0), HAS_TREE,
    )  # fmt: skip
    if num_rows == 0:
        finish(PDL, beside)
        return
    start, end, whole_end = seen_range(
        position, num_rows, tree_start, window, HAS_WINDOW, HAS_TREE, BLOCK_N
    )
    length = split_len(start, end, tl.num_programs(2), BLOCK_N)
    start = start + tl.program_id(2) * length
    if start >= end:
        finish(PDL, beside)
        return
    end = tl.minimum(start + length, end)
    acc, top, total = attend_range(
        q_ptr, kv_ptr, table_ptr, outside_ptr, ancestors_ptr, table_row, kv_start, first_token,
        num_rows, position, tree_start, start, end, whole_end,
        q_token, q_head, kv_slot, kv_head, table_width, window, scale,
        NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_TREE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
    )  # fmt: skip
    _leave_sums(
        tl.program_id(0), tl.program_id(2), tl.num_programs(2), num_rows, acc, top, total,
        sums_ptr, stats_ptr, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    finish(PDL, beside)


def constants_of(
    q: torch.Tensor, kv: torch.Tensor, window: int | None, tiles: Tiles
) -> dict[str, int | bool]:
    """Returns the constants that every attention kernel is compiled with."""
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
    items: torch.Tensor, paged: Paged, window: int | None, tiles: Tiles, launch: ParallelLaunch,
    shared: Shares | None = None,
) -> None:  # fmt: skip
    """Attention of `items` [I, 4] int32.

    Args:
        q: [T, num_heads, head_dim], any strides but the last.
        kv: [num_slots, 2 * num_kv_heads, head_dim].
        out: [T, num_heads * head_dim] contiguous; the items' rows are written.
        shared: None: one program per item and KV head.
    """
    constants = constants_of(q, kv, window, tiles)
    num_programs, num_splits, stats, sums = len(items), None, None, None
    if shared is not None:
        num_programs, num_splits = shared.num_programs, shared.num_splits
        stats, sums = stats_and_sums(shared.workspace, tiles.block_m, kv.shape[2])
    _extend_kernel[(num_programs, kv.shape[1] // 2)](
        q, kv, out, sums, stats, items, num_splits, paged.table, paged.outside, paged.rows,
        paged.kv_lens, paged.kv_starts, paged.ancestors, paged.q_starts, paged.tree_starts,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        window or 0, paged.scale_of(kv), len(items),
        **constants, HAS_TREE=paged.ancestors is not None, SOFTCAP=paged.softcap,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch.options(q.device, num_programs * constants["NUM_KV_HEADS"]),
    )  # fmt: skip


def attend_items_split(
    q: torch.Tensor, kv: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, tiles: Tiles, launch: ParallelLaunch,
    num_splits: int, workspace: torch.Tensor,
) -> None:  # fmt: skip
    """As `attend_items`, with the KV of each item shared out among up to `num_splits` programs,
    in whole tiles. `add_up_splits` makes the result of what they leave in the workspace.

    Args:
        workspace: float32, `workspace_size` elements at least; of block_m packed rows.
    """
    constants = constants_of(q, kv, window, tiles)
    num_kv_heads, head_dim = kv.shape[1] // 2, kv.shape[2]
    stats, sums = stats_and_sums(workspace, tiles.block_m, head_dim)
    _split_kernel[(len(items), num_kv_heads, num_splits)](
        q, kv, sums, stats, items, paged.table, paged.outside, paged.rows, paged.kv_lens,
        paged.kv_starts, paged.ancestors, paged.q_starts, paged.tree_starts,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        window or 0, paged.scale_of(kv),
        **constants, HAS_TREE=paged.ancestors is not None, SOFTCAP=paged.softcap,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch.options(q.device, len(items) * num_kv_heads * num_splits),
    )  # fmt: skip


def stats_and_sums(
    workspace: torch.Tensor, block_m: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where programs leave (top, total) and acc of their packed rows."""
    size = 2 * (workspace.numel() // (head_dim + 2) // block_m * block_m)
    return workspace[:size], workspace[size:]


def workspace_size(num_programs: int, block_m: int, head_dim: int) -> int:
    """Elements that `attend_items_split` needs for a grid of `num_programs`."""
    return num_programs * block_m * (head_dim + 2)
