"""Matrix products of few rows, whose time is that of reading the weight: of 16 bits, or of 8 bits
with scales, for which each row is rounded to 8 bits by a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sglang.srt.layers.ops.activation import silu_times
from sglang.srt.layers.scaled_weight import CODES, LARGEST, ScaledWeight, Weight
from sglang.srt.layers.triton_launch import INTERPRETED, Launch, begin, read_ahead

MAX_FEW_ROWS = 64
MAX_SCALED_ROWS = 128
CACHE_LINE = tl.constexpr(128)  # bytes
LINES = tl.constexpr(2048)  # that a program reads ahead
EXACT_COLUMNS = 128
# Fields of `FewRows` of 8 bits by most rows, for weights of many outputs, of many inputs, of more
# than few outputs, and others.
SCALED_TILES = {
    16: (
        (16, 64, 256, 2, 4, 8),
        (16, 32, 512, 6, 4, 8),
        (16, 64, 256, 6, 8, 8),
        (16, 32, 256, 4, 4, 8),
    ),
    32: (
        (32, 128, 256, 2, 8, 4),
        (32, 32, 512, 6, 4, 4),
        (32, 64, 512, 3, 4, 4),
        (32, 64, 512, 3, 4, 4),
    ),
    64: (
        (64, 64, 128, 3, 4, 4),
        (64, 32, 256, 6, 4, 4),
        (64, 64, 256, 4, 8, 4),
        (64, 64, 128, 6, 4, 4),
    ),
    128: (
        (128, 128, 128, 3, 8, 2),
        (128, 32, 128, 6, 8, 2),
        (128, 64, 128, 6, 8, 2),
        (128, 32, 128, 6, 8, 2),
    ),
}


@triton.jit(do_not_specialize=["num_rows", "early"])
def _round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, weight_ptr, num_rows, num_features, size, largest,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """One program per row of `size` elements: its largest becomes `largest`. NaN stays NaN. Further
    programs read ahead AHEAD cache lines of each row of the weight, of 8 bits, that the rows will
    be multiplied by."""
    if AHEAD:  # noqa: SIM102 (a constant: without, nothing is compiled)
        if tl.program_id(0) >= num_rows:
            number = (tl.program_id(0) - num_rows) * LINES + tl.arange(0, LINES)
            feature = tl.minimum(number // AHEAD, num_features - 1).to(tl.int64)
            read_ahead(PDL, weight_ptr + feature * size + number % AHEAD * CACHE_LINE)
            return
    begin(PDL, early)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < size
    x = tl.load(x_ptr + row * size + place, mask=mask, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    scale = tl.where(most > 0, most / largest, 1.0)
    codes = tl.clamp(x / scale, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    codes = codes.to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + place, codes, mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows", "early"])
def _few_rows_kernel(
    x_ptr, weight_ptr, out_ptr, row_scales_ptr, scales_ptr, num_rows, out_features, in_features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    EXACT_K: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """x [num_rows, in_features] times the transpose of weight [out_features, in_features]: a
    program reads BLOCK_N rows of the weight, once. The blocks divide the features.

    row_scales, scales: of rows of x and of the weight if both have 8 bits, in float32; else None.
    EXACT_K: columns of 8 bits that tensor cores may sum in fewer bits than float32 has.
    GATED: of weight [2 * out_features, in_features], silu of the first half's product times that of
    the second, both rounded as products are; a program reads half of its rows from each."""
    begin(PDL, early)
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.arange(0, BLOCK_M)
    feature = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK_K)
    weight = weight_ptr + feature[:, None].to(tl.int64) * in_features + column[None, :]
    x = x_ptr + row[:, None] * in_features + column[None, :]
    exists = (row < num_rows)[:, None]
    total = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    second = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    for _ in range(0, in_features, BLOCK_K):
        w = tl.load(weight, eviction_policy="evict_first")
        values = tl.load(x, mask=exists, other=0.0)
        total = tl.dot(values, tl.trans(w), total, "ieee", max_num_imprecise_acc=EXACT_K)
        if GATED:
            below = weight + out_features.to(tl.int64) * in_features
            w = tl.load(below, eviction_policy="evict_first")
            second = tl.dot(values, tl.trans(w), second, "ieee", max_num_imprecise_acc=EXACT_K)
        weight += BLOCK_K
        x += BLOCK_K
    if scales_ptr is not None:
        row_scale = tl.load(row_scales_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        total = total * tl.load(scales_ptr + feature)[None, :] * row_scale
        if GATED:
            scale = tl.load(scales_ptr + out_features + feature)[None, :]
            second = second * scale * row_scale
    result = total.to(out_ptr.dtype.element_ty)
    if GATED:
        result = silu_times(result, second.to(result.dtype))
    out = out_ptr + row[:, None] * out_features + feature[None, :]
    tl.store(out, result, mask=exists)


@dataclass(frozen=True, slots=True)
class FewRows:
    """The launch of `_few_rows_kernel`, chosen on an H100.

    Attributes:
        ahead: cache lines of each row of the weight that are read while x is rounded to 8 bits.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    ahead: int = 0

    @classmethod
    def choose(
        cls,
        num_rows: int,
        out_features: int,
        in_features: int,
        shared_bytes: int,
        is_gated: bool = False,
        item_bytes: int = 2,
    ) -> FewRows | None:
        """None for more than `MAX_FEW_ROWS`, or where no block divides the features.

        Args:
            shared_bytes: of shared memory that a program may take; with less than an H100's, fewer
                stages.
            item_bytes: of a number of the weight and of x; 1: up to `MAX_SCALED_ROWS`.
        """
        is_scaled = item_bytes == 1
        if num_rows > (MAX_SCALED_ROWS if is_scaled else MAX_FEW_ROWS):
            return None
        block_m = next(rows for rows in (16, 32, 64, MAX_SCALED_ROWS) if num_rows <= rows)
        if INTERPRETED:
            chosen = cls(block_m, 64, 64, 1, 4)
        elif is_scaled:
            chosen = cls._scaled(num_rows, out_features, in_features)
        elif block_m == 16:
            if out_features >= 16384:
                chosen = cls(16, 64 if is_gated else 32, 128, 3, 4)
            elif in_features >= 8192:
                chosen = cls(16, 32, 256, 6, 4)
            elif out_features > 4224:
                chosen = cls(16, 64, 256, 4, 4)
            else:
                chosen = cls(16, 32, 128, 6, 4)
        elif out_features >= 16384:
            block_n = 64 if is_gated and block_m == 64 else 128
            chosen = cls(block_m, block_n, 128, 4 if block_m == 32 else 3, 4)
        elif in_features >= 8192:
            chosen = cls(64, 32, 128, 6, 4)
        elif out_features > 4224:
            chosen = cls(64, 64, 64, 8, 4) if block_m == 64 else cls(32, 64, 128, 5, 4)
        else:
            chosen = cls(block_m, 32, 128, 6, 4)
        if out_features % chosen.block_n or in_features % chosen.block_k:
            return None
        stage_bytes = (chosen.block_m + chosen.block_n) * chosen.block_k * item_bytes
        return replace(chosen, num_stages=min(chosen.num_stages, shared_bytes // stage_bytes))

    @classmethod
    def _scaled(cls, num_rows: int, out_features: int, in_features: int) -> FewRows:
        """The launch for numbers of 8 bits. Blocks of columns become smaller until they divide the
        features."""
        kinds = out_features >= 16384, in_features >= 8192, out_features > 4224, True
        tiles = next(tiles for most, tiles in SCALED_TILES.items() if num_rows <= most)
        chosen = cls(*tiles[kinds.index(True)])
        return replace(chosen, block_k=min(chosen.block_k, max(64, in_features & -in_features)))


def round_rows(
    x: torch.Tensor, weight: ScaledWeight, ahead: int, launch: Launch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row of x [T, in_features] to 8 bits; returns its codes, and its scale: [T, 1].

    Args:
        weight: what x will be multiplied by.
        ahead: cache lines of each of the weight's rows that are read ahead, if it has as many.
    """
    (num_rows, size), x = x.shape, x.contiguous()
    codes = torch.empty_like(x, dtype=CODES)
    scales = x.new_empty((num_rows, 1), dtype=torch.float32)
    if num_rows:
        num_features, ahead = len(weight.codes), min(ahead, size // CACHE_LINE.value)
        num_programs = num_rows + triton.cdiv(num_features * ahead, LINES)
        _round_rows_kernel[(num_programs,)](
            x, codes, scales, weight.codes, num_rows, num_features, size, LARGEST,
            BLOCK=triton.next_power_of_2(size), AHEAD=ahead, num_warps=8 if size > 1024 else 4,
            **launch(num_programs),
        )  # fmt: skip
    return codes, scales


def product_of_few_rows(
    x: torch.Tensor, weight: Weight, is_gated: bool, shared_bytes: int, launch: Launch
) -> torch.Tensor | None:
    """Computes `LayerOps.linear`, or `gated_linear`, of contiguous x without a bias; None for what
    `FewRows` has no launch."""
    numbers = weight.codes if isinstance(weight, ScaledWeight) else weight
    (num_rows, in_features), num_features = x.shape, len(numbers)
    tiles = FewRows.choose(
        num_rows, num_features, in_features, shared_bytes, is_gated, numbers.itemsize
    )
    if tiles is None:
        return None
    out_features = num_features // 2 if is_gated else num_features
    out = x.new_empty((num_rows, out_features))
    row_scales = scales = None
    if isinstance(weight, ScaledWeight):
        x, row_scales = round_rows(x, weight, tiles.ahead, launch)
        scales = weight.scales
    num_programs = num_features // tiles.block_n
    _few_rows_kernel[(num_programs,)](
        x, numbers, out, row_scales, scales, num_rows, out_features, in_features,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GATED=is_gated,
        EXACT_K=min(EXACT_COLUMNS, tiles.block_k),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch(num_programs),
    )  # fmt: skip
    return out
