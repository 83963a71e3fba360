"""Attends to KV that several requests of a step share, once for a tile of requests.

Each request feeds one row. A tile's rows are those of up to BLOCK_M // group requests of one
`SharedPrefix`, and the `group` query heads that share a KV head are laid out as further rows. Its
KV is shared out among programs as in `attend_items_split`; the requests' own KV, after the prefix,
goes through that function. The second kernel adds up what both have left in their workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.items import attend_tiles, first_kv, split_len
from sglang.srt.layers.attention.triton_ops.kernels import (
    Paged,
    Tiles,
    constants_of,
    stats_and_sums,
)
from sglang.srt.layers.triton_launch import ParallelLaunch, begin, dependent_launch

MAX_SHARED_SPLITS = 16  # parts of a prefix
TILE_SIZE = 4  # numbers of a tile: its first member, members, and tokens of its prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTiles:
    """Tiles of a step, on the device. All are int32.

    Attributes:
        counts: [4]; tiles, and splits of the KV of each.
        tiles: [room for tiles, TILE_SIZE].
        members: [room for requests]; requests of the tiles, tile by tile.
        places: [rows of the page table]; tile * (requests of a tile) + place in the tile of the
            request that has the row; -1 if it is in no tile.
        starts: [rows of the page table]; tokens of the prefix, 0 without one.
    """

    counts: torch.Tensor
    tiles: torch.Tensor
    members: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


@triton.jit
def _attend_prefix(
    tile, split, num_splits, q_ptr, kv_ptr, sums_ptr, stats_ptr, tiles_ptr, members_ptr, table_ptr,
    rows_ptr, q_token, q_head, kv_slot, kv_head, table_width, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):  # fmt: skip
    """Goes over one split of the KV of a tile and leaves acc, top and total in the workspace."""
    first = tl.load(tiles_ptr + tile * TILE_SIZE)
    num_members = tl.load(tiles_ptr + tile * TILE_SIZE + 1)
    num_tokens = tl.load(tiles_ptr + tile * TILE_SIZE + 2)
    length = split_len(0, num_tokens, num_splits, BLOCK_N)
    start = split * length
    end = tl.minimum(start + length, num_tokens)
    if start < end:
        kv_index = tl.program_id(1)
        row = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        is_member = row // GROUP < num_members
        request = tl.load(members_ptr + first + row // GROUP, mask=is_member, other=0).to(tl.int64)
        head = kv_index * GROUP + row % GROUP
        exists = is_member[:, None] & (dim < HEAD_DIM)[None, :]
        q_rows = q_ptr + request * q_token + head * q_head
        q = tl.load(q_rows[:, None] + dim[None, :], mask=exists, other=0.0)
        table_row = tl.load(rows_ptr + tl.load(members_ptr + first))
        slots_base = table_ptr + table_row * table_width
        kv_base = kv_ptr + kv_index * kv_head
        v_offset = NUM_KV_HEADS * kv_head
        position = tl.full([BLOCK_M], 0, dtype=tl.int32) + num_tokens
        top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        whole_end = end // BLOCK_N * BLOCK_N
        acc, top, total = attend_tiles(
            q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, position, position, None,
            0, start, whole_end, 0, scale, False, False, False, HEAD_DIM, BLOCK_N, BLOCK_D,
            SOFTCAP,
        )  # fmt: skip
        acc, top, total = attend_tiles(
            q, acc, top, total, kv_base, v_offset, kv_slot, slots_base, position, position, None,
            0, whole_end, end, 0, scale, True, False, False, HEAD_DIM, BLOCK_N, BLOCK_D,
            SOFTCAP,
        )  # fmt: skip
        part = ((tile * NUM_KV_HEADS + kv_index) * num_splits + split).to(tl.int64)
        place = part * BLOCK_M + row
        tl.store(sums_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=exists)
        tl.store(stats_ptr + place * 2, top)
        tl.store(stats_ptr + place * 2 + 1, total)


@triton.jit(do_not_specialize=["early"])
def _prefix_kernel(
    q_ptr, kv_ptr, sums_ptr, stats_ptr, counts_ptr, tiles_ptr, members_ptr, table_ptr, rows_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (programs that take splits of tiles in turn, KV heads)."""
    begin(PDL, early)
    num_tiles = tl.load(counts_ptr)
    num_splits = tl.load(counts_ptr + 1)
    for share in range(tl.program_id(0), num_tiles * num_splits, tl.num_programs(0)):
        _attend_prefix(
            share // num_splits, share % num_splits, num_splits, q_ptr, kv_ptr, sums_ptr,
            stats_ptr, tiles_ptr, members_ptr, table_ptr, rows_ptr,
            q_token, q_head, kv_slot, kv_head, table_width, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, TILE_SIZE,
        )  # fmt: skip


@triton.jit
def _load_parts(
    sums_ptr, stats_ptr, row, used,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Top and total [BLOCK_S] and sums [BLOCK_S, BLOCK_D] of the `used` ones of these packed
    rows."""
    top = tl.load(stats_ptr + row * 2, mask=used, other=-1e30)
    total = tl.load(stats_ptr + row * 2 + 1, mask=used, other=0.0)
    dim = tl.arange(0, BLOCK_D)
    exists = used[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.load(sums_ptr + row[:, None] * HEAD_DIM + dim[None, :], mask=exists, other=0.0)
    return top, total, sums


@triton.jit(do_not_specialize=["num_splits", "early"])
def _add_up_kernel(
    out_ptr, own_sums_ptr, own_stats_ptr, sums_ptr, stats_ptr, counts_ptr, tiles_ptr, places_ptr,
    starts_ptr, rows_ptr, kv_lens_ptr, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, KV heads, query heads of one): adds up the splits of a request's own KV and
    those of its tile. BLOCK_M and BLOCK_N are of the first, TILE_M and TILE_N of the second."""
    begin(PDL, early)
    request = tl.program_id(0)
    kv_index = tl.program_id(1)
    query = tl.program_id(2)
    table_row = tl.load(rows_ptr + request)
    own_len = tl.load(kv_lens_ptr + request).to(tl.int32) - first_kv(starts_ptr, table_row)
    split = tl.arange(0, BLOCK_S)
    length = split_len(0, own_len, num_splits, BLOCK_N)
    part = (request * NUM_KV_HEADS + kv_index).to(tl.int64) * num_splits + split
    own_top, own_total, own_sums = _load_parts(
        own_sums_ptr, own_stats_ptr, part * BLOCK_M + query,
        (split < num_splits) & (split * length < own_len), HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    place = tl.load(places_ptr + table_row)
    used_splits = tl.where(place >= 0, tl.load(counts_ptr + 1), 0)
    place = tl.maximum(place, 0)
    tile = place // (TILE_M // GROUP)
    packed = place % (TILE_M // GROUP) * GROUP + query
    num_tokens = tl.load(tiles_ptr + tile * TILE_SIZE + 2)
    tile_splits = tl.load(counts_ptr + 1)
    split = tl.arange(0, MAX_SPLITS)
    length = split_len(0, num_tokens, tile_splits, TILE_N)
    part = (tile * NUM_KV_HEADS + kv_index).to(tl.int64) * tile_splits + split
    top, total, sums = _load_parts(
        sums_ptr, stats_ptr, part * TILE_M + packed,
        (split < used_splits) & (split * length < num_tokens), HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    highest = tl.maximum(tl.max(own_top, 0), tl.max(top, 0))
    own_weight = tl.exp2(own_top - highest)
    weight = tl.exp2(top - highest)
    whole = tl.sum(own_total * own_weight, 0) + tl.sum(total * weight, 0)
    out = tl.sum(own_sums * own_weight[:, None], 0) + tl.sum(sums * weight[:, None], 0)
    out = out / tl.where(whole > 0, whole, 1.0)
    head = kv_index * GROUP + query
    dim = tl.arange(0, BLOCK_D)
    out_row = out_ptr + (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out_row + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def attend_prefixes(
    q: torch.Tensor, kv: torch.Tensor, paged: Paged, shared: SharedTiles, tiles: Tiles,
    launch: ParallelLaunch, num_programs: int, workspace: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of all tiles to their prefixes, as far as `add_up_prefixes`.

    Args:
        q: [T, num_heads, head_dim], one row for each request.
        kv: [num_slots, 2 * num_kv_heads, head_dim].
        num_programs: of each KV head.
        workspace: float32, with room for as many programs as there are tiles times splits.
    """
    constants = constants_of(q, kv, None, tiles)
    del constants["HAS_WINDOW"]
    stats, sums = stats_and_sums(workspace, tiles.block_m, kv.shape[2])
    options = launch.options(q.device, num_programs * constants["NUM_KV_HEADS"])
    del options["beside"]
    _prefix_kernel[(num_programs, kv.shape[1] // 2)](
        q, kv, sums, stats, shared.counts, shared.tiles, shared.members, paged.table, paged.rows,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        paged.scale_of(kv), **constants, SOFTCAP=paged.softcap, TILE_SIZE=TILE_SIZE,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
    )  # fmt: skip


def add_up_prefixes(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, paged: Paged, shared: SharedTiles,
    own: tuple[Tiles, int, torch.Tensor], prefix: tuple[Tiles, torch.Tensor],
) -> None:  # fmt: skip
    """Writes `out` [R, num_heads * head_dim], after `attend_prefixes` and `attend_items_split`.

    Args:
        own: tiles, splits and workspace of the requests' own KV, whose items are in their order.
        prefix: tiles and workspace of prefixes.
    """
    own_tiles, num_splits, own_workspace = own
    tiles, workspace = prefix
    constants = constants_of(q, kv, None, own_tiles)
    del constants["HAS_WINDOW"]
    head_dim = kv.shape[2]
    own_stats, own_sums = stats_and_sums(own_workspace, own_tiles.block_m, head_dim)
    stats, sums = stats_and_sums(workspace, tiles.block_m, head_dim)
    block_s = next(size for size in (1, 8, 64) if num_splits <= size)  # each is compiled anew
    grid = (len(out), constants["NUM_KV_HEADS"], constants["GROUP"])
    _add_up_kernel[grid](
        out, own_sums, own_stats, sums, stats, shared.counts, shared.tiles, shared.places,
        shared.starts, paged.rows, paged.kv_lens, num_splits,
        **constants, TILE_M=tiles.block_m, TILE_N=tiles.block_n, TILE_SIZE=TILE_SIZE,
        BLOCK_S=block_s, MAX_SPLITS=MAX_SHARED_SPLITS, num_warps=1 if block_s <= 8 else 4,
        **dependent_launch(q.device, grid[0] * grid[1] * grid[2]),
    )  # fmt: skip
