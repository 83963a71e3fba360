"""Attention whose result for a row has the same bits whatever shares its step.

The KV positions of a request are cut into parts at fixed places: PARTS_OF_A_LENGTH parts of
`first_len` positions, as many of twice that length, and so on. Within a part a row's sums go over
tiles of BLOCK_N positions in their order; parts are then added up in theirs. Both orders depend on
positions alone. So one program may go over all parts of an item (`items.py`), or several may leave
the sums of a part each for `add_up_parts`; an item may have any number of rows, and any BLOCK_M.
What a row does not see changes its sums by nothing: weights are 0, and factors are 1.

BLOCK_N must be the same in all launches, and each warp must hold whole rows of scores: 16 rows of
a warp, as `Tiles` with block_m = 16 * num_warps are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.items import (
    attend_range,
    load_item,
    packed_mask,
    packed_offsets,
    seen_range,
)
from sglang.srt.layers.attention.triton_ops.kernels import Paged, Tiles, constants_of
from sglang.srt.layers.triton_launch import ParallelLaunch, begin, dependent_launch, finish

PARTS_OF_A_LENGTH = 16
MAX_LENGTHS = 20  # so that 2**31 positions have a part
SUM_ROWS = 4  # packed rows whose parts a program adds up
STARTS = ["kv_starts_ptr", "q_starts_ptr"]  # maybe parts of other tensors
_PARTS_OF_A_LENGTH = tl.constexpr(PARTS_OF_A_LENGTH)
_MAX_LENGTHS = tl.constexpr(MAX_LENGTHS)


def num_parts(num_positions: int, first_len: int) -> int:
    """Returns the number of parts of so many positions; `part_of` finds the same on the device."""
    count, start, length = 0, 0, first_len
    while start < num_positions:
        found = min(-(-(num_positions - start) // length), PARTS_OF_A_LENGTH)
        count, start, length = count + found, start + found * length, 2 * length
    return count


@triton.jit
def part_start(part, FIRST_LEN: tl.constexpr):
    """First position of a part."""
    doublings = part // _PARTS_OF_A_LENGTH
    lengths = (1 << doublings) - 1  # those before this one, in parts of the first length
    place = part % _PARTS_OF_A_LENGTH
    return (lengths * _PARTS_OF_A_LENGTH + (place << doublings)) * FIRST_LEN


@triton.jit
def part_of(position, FIRST_LEN: tl.constexpr):
    """The part that a position lies in."""
    groups = position // (_PARTS_OF_A_LENGTH * FIRST_LEN) + 1
    doublings = position * 0
    for number in tl.static_range(1, _MAX_LENGTHS):
        doublings += (groups >> number > 0).to(tl.int32)
    start = part_start(doublings * _PARTS_OF_A_LENGTH, FIRST_LEN)
    return doublings * _PARTS_OF_A_LENGTH + (position - start) // (FIRST_LEN << doublings)


@triton.jit
def _add_part(acc, top, total, part_acc, part_top, part_total):
    """The sums so far and those of one more part; acc [rows, dim], top and total [rows]. Products
    and sums are written as they are rounded, so that all kernels round alike."""
    new_top = tl.maximum(top, part_top)
    decay = tl.exp2(top - new_top)
    weight = tl.exp2(part_top - new_top)
    total = tl.fma(part_total, weight, total * decay)
    weights = tl.broadcast_to(weight[:, None], acc.shape)
    return tl.fma(part_acc, weights, acc * decay[:, None]), new_top, total


@triton.jit
def _result(acc, total):
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=[*STARTS, "window", "room_parts", "room_rows", "early", "beside"])
def _parts_kernel(
    q_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, items_ptr, table_ptr, outside_ptr, rows_ptr,
    kv_lens_ptr, kv_starts_ptr, q_starts_ptr,
    q_token, q_head, kv_slot, kv_head, table_width, window, scale, room_parts, room_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr, FIRST_LEN: tl.constexpr, LEAVES: tl.constexpr,
    PDL: tl.constexpr, early, beside,
):  # fmt: skip
    """Grid (items, KV heads, programs that take the parts of an item in turn).

    LEAVES: each part's sums go to the workspace. Else there is one program, which adds them up."""
    begin(PDL, early, beside)
    table_row, kv_start, first_token, num_rows, position, kv_len = load_item(
        items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, None, tl.program_id(0), False
    )  # fmt: skip
    start, end, whole_end = seen_range(
        position, num_rows, kv_len, window, HAS_WINDOW, False, BLOCK_N
    )
    if (num_rows > 0) & (start < end):
        exists = packed_mask(num_rows, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
        row, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        kv_index = tl.program_id(1)
        room = (tl.program_id(0) * NUM_KV_HEADS + kv_index).to(tl.int64) * room_parts
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        first = part_of(start, FIRST_LEN) + tl.program_id(2)
        count = part_of(end - 1, FIRST_LEN) + 1 - first
        for number in range(0, count, tl.num_programs(2)):
            part = first + number
            part_acc, part_top, part_total = attend_range(
                q_ptr, kv_ptr, table_ptr, outside_ptr, None, table_row, kv_start, first_token,
                num_rows, position, kv_len, tl.maximum(start, part_start(part, FIRST_LEN)),
                tl.minimum(end, part_start(part + 1, FIRST_LEN)), whole_end,
                q_token, q_head, kv_slot, kv_head, table_width, window, scale,
                NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, False, BLOCK_M, BLOCK_N, BLOCK_D,
                SOFTCAP,
            )  # fmt: skip
            if LEAVES:
                place = (room + part) * room_rows + row
                sums = sums_ptr + place[:, None] * HEAD_DIM + dim[None, :]
                tl.store(sums, part_acc, mask=exists)
                tl.store(stats_ptr + place * 2, part_top, mask=row < room_rows)
                tl.store(stats_ptr + place * 2 + 1, part_total, mask=row < room_rows)
            else:
                acc, top, total = _add_part(acc, top, total, part_acc, part_top, part_total)
        if not LEAVES:
            offsets = packed_offsets(
                first_token, kv_index, NUM_KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM,
                GROUP, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            out = _result(acc, total)
            tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=exists)
    finish(PDL, beside)


@triton.jit(do_not_specialize=[*STARTS, "window", "room_parts", "room_rows", "early"])
def _add_up_kernel(
    out_ptr, sums_ptr, stats_ptr, items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr,
    window, room_parts, room_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FIRST_LEN: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (items, KV heads, blocks of ROWS packed rows): adds up what `_parts_kernel` has left,
    AT_ONCE parts being read at once."""
    begin(PDL, early)
    _, _, first_token, num_rows, position, kv_len = load_item(
        items_ptr, rows_ptr, kv_lens_ptr, kv_starts_ptr, q_starts_ptr, None, tl.program_id(0), False
    )  # fmt: skip
    start, end, _ = seen_range(position, num_rows, kv_len, window, HAS_WINDOW, False, BLOCK_N)
    row, dim = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    is_row = row < num_rows * GROUP
    exists = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    if (tl.program_id(2) * ROWS < num_rows * GROUP) & (start < end):
        kv_index = tl.program_id(1)
        room = (tl.program_id(0) * NUM_KV_HEADS + kv_index).to(tl.int64) * room_parts
        acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        top = tl.full([ROWS], -1e30, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        first, past = part_of(start, FIRST_LEN), part_of(end - 1, FIRST_LEN) + 1
        for block in range(0, past - first, AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                part = first + block + number
                is_part = part + row * 0 < past  # others have no weight
                place = (room + part) * room_rows + row
                part_top = tl.load(stats_ptr + place * 2, mask=is_row & is_part, other=-1e30)
                part_total = tl.load(stats_ptr + place * 2 + 1, mask=is_row & is_part, other=0.0)
                sums = sums_ptr + place[:, None] * HEAD_DIM + dim[None, :]
                part_acc = tl.load(sums, mask=exists & is_part[:, None], other=0.0)
                acc, top, total = _add_part(acc, top, total, part_acc, part_top, part_total)
        token = first_token + row // GROUP
        head = kv_index * GROUP + row % GROUP
        offsets = (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
        out = _result(acc, total)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=exists)


class Workspace:
    """Sums of parts between `attend_parts` and `add_up_parts`.

    Args:
        num_floats: that it has room for.
    """

    def __init__(self, num_floats: int, head_dim: int, device: torch.device) -> None:
        self._rows = num_floats // (head_dim + 2)
        # Filled with NaN, so that reading a place that no part has written shows.
        self.sums, self.stats = (
            torch.full((self._rows * size,), float("nan"), device=device) for size in (head_dim, 2)
        )

    def holds(self, num_items: int, num_kv_heads: int, parts: int, packed_rows: int) -> bool:
        """Tells whether there is room for the parts of so many items."""
        return num_items * num_kv_heads * parts * packed_rows <= self._rows


def attend_parts(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, tiles: Tiles, launch: ParallelLaunch, first_len: int,
    num_programs: int, room: tuple[int, int], workspace: Workspace,
) -> None:  # fmt: skip
    """Attends `items` [I, 4] int32; arguments as of `attend_items`.

    Args:
        first_len: positions of the first parts, a multiple of block_n.
        num_programs: that share the parts of an item; with several, `add_up_parts` makes the
            result of what they leave in the workspace.
        room: parts of an item, and its packed rows, at most.
    """
    constants = constants_of(q, kv, window, tiles)
    num_kv_heads = kv.shape[1] // 2
    grid = len(items), num_kv_heads, num_programs
    _parts_kernel[grid](
        q, kv, out, workspace.sums, workspace.stats, items, paged.table, paged.outside, paged.rows,
        paged.kv_lens, paged.kv_starts, paged.q_starts,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), paged.table.stride(0),
        window or 0, paged.scale_of(kv), *room, **constants, SOFTCAP=paged.softcap,
        FIRST_LEN=first_len, LEAVES=num_programs > 1,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch.options(q.device, grid[0] * grid[1] * grid[2]),
    )  # fmt: skip


def add_up_parts(
    q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, tiles: Tiles, first_len: int, room: tuple[int, int], workspace: Workspace,
) -> None:  # fmt: skip
    """Writes the items' rows of `out`, after `attend_parts` of several programs."""
    constants = constants_of(q, kv, window, tiles)
    del constants["BLOCK_M"]
    grid = len(items), kv.shape[1] // 2, triton.cdiv(room[1], SUM_ROWS)
    _add_up_kernel[grid](
        out, workspace.sums, workspace.stats, items, paged.rows, paged.kv_lens, paged.kv_starts,
        paged.q_starts, window or 0, *room, **constants, FIRST_LEN=first_len, ROWS=SUM_ROWS,
        AT_ONCE=8, num_warps=4, **dependent_launch(q.device, grid[0] * grid[1] * grid[2]),
    )  # fmt: skip
