"""Copies the paged K and V of requests so that each one's lie side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.items import first_kv
from sglang.srt.layers.attention.triton_ops.kernels import Paged
from sglang.srt.layers.triton_launch import begin, dependent_launch, report_outside

PLACE_SIZE = 3
BLOCK_ROWS, BLOCK_COLUMNS = 32, 512


@triton.jit(do_not_specialize=["places_ptr", "early"])  # places are part of another tensor
def _gather_kv_kernel(
    kv_ptr, out_ptr, places_ptr, table_ptr, outside_ptr, rows_ptr, kv_lens_ptr,
    kv_starts_ptr, kv_slot, table_width,
    COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (programs that share the positions, blocks of columns, requests)."""
    begin(PDL, early)
    place = places_ptr + tl.program_id(2) * 3
    request = tl.load(place)
    if request < 0:
        return
    first_row = tl.load(place + 1)
    room = tl.load(place + 2)
    table_row = tl.load(rows_ptr + request)
    kv_start = first_kv(kv_starts_ptr, table_row)
    kv_len = tl.load(kv_lens_ptr + request).to(tl.int32)
    report_outside(outside_ptr, kv_len - 1, kv_len > table_width)
    kv_len = tl.minimum(tl.minimum(kv_len, table_width) - kv_start, room)
    end = tl.cdiv(kv_len, ALIGNMENT) * ALIGNMENT
    slots_base = table_ptr + table_row * table_width + kv_start
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = (column < COLUMNS)[None, :]
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in range(tl.program_id(0) * BLOCK_ROWS, end, step):
        position = first + tl.arange(0, BLOCK_ROWS)
        exists = position < kv_len
        slots = tl.load(slots_base + position, mask=exists, other=0).to(tl.int64)
        values = tl.load(
            kv_ptr + (slots * kv_slot)[:, None] + column[None, :],
            mask=exists[:, None] & is_column,
            other=0.0,
        )
        offsets = (first_row + position).to(tl.int64) * COLUMNS
        tl.store(out_ptr + offsets[:, None] + column[None, :], values, mask=is_column)


def gather_kv(
    kv: torch.Tensor, out: torch.Tensor, places: torch.Tensor, paged: Paged,
    num_positions: int, alignment: int,
) -> None:  # fmt: skip
    """Copies K and V of requests from a layer's pool.

    Args:
        kv: [num_slots, 2 * num_kv_heads, head_dim], each slot contiguous.
        out: [rows, 2 * num_kv_heads, head_dim] contiguous. What lies between a request's end and
            the next multiple of `alignment` becomes 0.
        places: [P, 3] int32; index of the request (-1: none), the row of `out` for the first KV
            that is seen, and the rows from there on that are its own, a multiple of `alignment`:
            a length that says more is not believed.
        num_positions: of the longest request, about: it decides the number of programs.
        alignment: positions; a multiple of 32.
    """
    columns = kv.shape[1] * kv.shape[2]
    block_columns = min(BLOCK_COLUMNS, triton.next_power_of_2(columns))
    grid = (
        triton.cdiv(num_positions, BLOCK_ROWS),
        triton.cdiv(columns, block_columns),
        len(places),
    )
    _gather_kv_kernel[grid](
        kv, out, places, paged.table, paged.outside, paged.rows, paged.kv_lens,
        paged.kv_starts, kv.stride(0), paged.table.stride(0), COLUMNS=columns, ALIGNMENT=alignment,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=block_columns, num_warps=4,
        **dependent_launch(kv.device, grid[0] * grid[1] * grid[2]),
    )  # fmt: skip
