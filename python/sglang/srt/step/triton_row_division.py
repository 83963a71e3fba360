"""Divides the rows of a step among its requests in one Triton kernel of one program.

Passes over the values of all rows, which stay in registers, count the rows at or above a value, and
so find the value of the last row that is kept. A sort would take far longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin
from sglang.srt.step import row_division
from sglang.srt.step.row_division import WantedRows
from sglang.srt.step.step_sizes import MAX_DRAFTS, MAX_REQUESTS
from sglang.srt.step.triton_commit_run import step_launch

THREADS_OF_WARP = 32
_HIGHEST_VALUE = tl.constexpr(row_division.HIGHEST_VALUE)
_NUM_VALUES = tl.constexpr(triton.next_power_of_2(row_division.HIGHEST_VALUE + 2))
_NUM_OFFSETS = tl.constexpr(triton.next_power_of_2(row_division.MAX_DRAFTS + 1))
_ABSENT = tl.constexpr(-1)  # the value of a row that does not exist; no count asks for it


@triton.jit
def _write_values(
    values_ptr, confidence_ptr, place, count, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the values of the `count` drafts of each request, [WIDTH, BLOCK] int32; `place`
    [BLOCK] int64 is each request's row of the table of confidences."""
    product = tl.full((BLOCK,), 1.0, tl.float32)
    for column in range(WIDTH):
        is_row = exists & (column < count)
        confidence = tl.load(confidence_ptr + place * WIDTH + column, mask=is_row, other=1.0)
        # NaN is not above 0.
        confidence = tl.where(confidence > 0.0, tl.minimum(confidence, 1.0), 0.0)
        product = product * confidence
        value = tl.where(is_row, (product * _HIGHEST_VALUE).to(tl.int32), _ABSENT)
        tl.store(values_ptr + column * BLOCK + tl.arange(0, BLOCK), value)


@triton.jit
def _read_values(values_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Tuple of [CHUNK, BLOCK] int32, with more rows than there are if WIDTH is no multiple."""
    values = ()
    for start in tl.static_range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)[:, None]
        pointers = values_ptr + column * BLOCK + tl.arange(0, BLOCK)[None, :]
        part = tl.load(pointers, mask=column < WIDTH, other=_ABSENT)
        values += (part,)  # type: ignore[assignment]
    return values


@triton.jit
def _has_at_least(values, lowest, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK] int32, whose sum over a request is the number of its rows with at least that
    value."""
    count = tl.zeros((CHUNK, BLOCK), tl.int32)
    for part in tl.static_range(len(values)):
        count += (values[part] >= lowest).to(tl.int32)
    return count


@triton.jit
def _most_valuable(values, room, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] int32; the rows that each request keeps if `room` are kept in all, fewer than there
    are."""
    # The highest value that more rows than that have at least.
    value, bit = room * 0 - 1, room * 0 + _NUM_VALUES
    while bit > 1:
        bit = bit >> 1
        if tl.sum(_has_at_least(values, value + bit, CHUNK, BLOCK)) > room:
            value += bit
    above = tl.sum(_has_at_least(values, value + 1, CHUNK, BLOCK), 0)
    equal = tl.sum(_has_at_least(values, value, CHUNK, BLOCK), 0) - above
    room -= tl.sum(above)
    # Of the rows with that value the same number of each request fit, its first ones.
    end, bit = room * 0, room * 0 + _NUM_OFFSETS
    while bit > 1:
        bit = bit >> 1
        if tl.sum(tl.minimum(tl.maximum(end + bit - above, 0), equal)) <= room:
            end += bit
    fitting = tl.minimum(tl.maximum(end - above, 0), equal)
    # And one more of the first requests that have one there.
    has_next = ((above <= end) & (end < above + equal)).to(tl.int32)
    is_before = tl.cumsum(has_next, 0) <= room - tl.sum(fitting)
    return above + fitting + tl.where(is_before, has_next, 0)


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "early"],
    do_not_specialize_on_alignment=["least_ptr", "num_drafts_ptr", "rows_ptr"],
)
def _divide_kernel(
    least_ptr, num_drafts_ptr, rows_ptr, confidence_ptr, values_ptr, out_ptr, num_reqs, num_rows,
    MAX_DRAFTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (1). See `RowDivision.divide`.

    Args:
        rows_ptr: None if request i has row i of the table of confidences.
        values_ptr: [MAX_DRAFTS, BLOCK] int32; overwritten.
        BLOCK: `num_reqs` at least.
    """
    begin(PDL, early)
    request = tl.arange(0, BLOCK)
    exists = request < num_reqs
    least = tl.load(least_ptr + request, mask=exists, other=0)
    least = tl.minimum(tl.maximum(least, 0), num_rows)
    num_drafts = tl.load(num_drafts_ptr + request, mask=exists, other=0)
    num_kept = tl.minimum(tl.maximum(num_drafts, 0), MAX_DRAFTS).to(tl.int32)
    place = request.to(tl.int64)
    if rows_ptr is not None:
        place = tl.load(rows_ptr + request, mask=exists, other=0)

    room = tl.maximum(num_rows - tl.sum(least), 0).to(tl.int32)
    if tl.sum(num_kept) > room:
        _write_values(values_ptr, confidence_ptr, place, num_kept, exists, MAX_DRAFTS, BLOCK)
        tl.debug_barrier()  # other threads read them
        values = _read_values(values_ptr, MAX_DRAFTS, CHUNK, BLOCK)
        num_kept = _most_valuable(values, room, CHUNK, BLOCK)

    end = tl.minimum(tl.cumsum(least + num_kept, 0), num_rows)
    tl.store(out_ptr, room.to(tl.int64) * 0)
    tl.store(out_ptr + 1 + request, end, mask=exists)


class TritonRowDivision:
    """See `RowDivision`. Compiled once for each width of the table, and again without `rows`;
    `max_requests` is the most that a step has, and sets how many threads there are."""

    def __init__(self, device: torch.device, max_requests: int) -> None:
        assert 1 <= max_requests <= MAX_REQUESTS, f"{max_requests} requests"
        self._device = device
        self._max_requests = max_requests
        self._launch = {**tile_and_warps(max_requests), **step_launch(device)}
        size = self._launch["BLOCK"] * MAX_DRAFTS
        self._values = torch.empty(size, dtype=torch.int32, device=device)

    def divide(self, wanted: WantedRows, num_rows: int) -> torch.Tensor:
        wanted.check(num_rows)
        num_reqs = len(wanted.least)
        assert num_reqs <= self._max_requests, f"{num_reqs} requests"
        out = torch.empty(num_reqs + 1, dtype=torch.int64, device=self._device)
        _divide_kernel[(1,)](
            wanted.least, wanted.num_drafts, wanted.rows, wanted.confidence, self._values, out,
            num_reqs, num_rows, MAX_DRAFTS=wanted.confidence.shape[1], **self._launch,
        )  # fmt: skip
        return out


def tile_and_warps(max_requests: int) -> dict[str, int]:
    """Launch options of the kernel: a thread for each request."""
    block = max(THREADS_OF_WARP, triton.next_power_of_2(max_requests))
    return {"CHUNK": 8, "BLOCK": block, "num_warps": block // THREADS_OF_WARP}
