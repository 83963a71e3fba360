"""Implements `LayerOps`: the operations between matrix products, each in one Triton kernel, and
matrix products of few rows. All of it is bound by memory, or by the time that a launch takes; sums
are float32.

On GPUs that can, a kernel is launched while the one before it ends (`PDL`: CUDA's programmatic
dependent launch) and waits for it before it reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang.srt.layers.ops.activation import silu_times
from sglang.srt.layers.ops.expert_products import ExpertTiles, compute_experts
from sglang.srt.layers.scaled_weight import CODES, LARGEST, ScaledWeight, Weight
from sglang.srt.layers.triton_launch import INTERPRETED, begin, dependent_launch, read_ahead
from sglang.srt.platform import shared_memory_bytes

MUL_BLOCK = 1024
MAX_FEW_ROWS = 64
MAX_SCALED_ROWS = 128
CACHE_LINE = tl.constexpr(128)  # bytes
LINES = tl.constexpr(2048)  # that a program reads ahead
EXACT_COLUMNS = 128  # that tensor cores may sum in fewer bits than float32 has, of 8 bits each


@triton.jit(do_not_specialize=["early"])
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, size, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """One program per row of `size` elements."""
    begin(PDL, early)
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    mask = place < size
    x = tl.load(x_ptr + row + place, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = (x + tl.load(residual_ptr + row + place, mask=mask, other=0.0)).to(x.dtype)
        tl.store(sum_ptr + row + place, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out = wide * scale * weight
    tl.store(out_ptr + row + place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["early"])
def _silu_and_mul_kernel(
    gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr, early
):  # fmt: skip
    """Grid (rows, blocks of the `size` outputs of a row)."""
    begin(PDL, early)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    gate = tl.load(gate_up_ptr + row * 2 * size + place, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + place, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + place, silu_times(gate, up), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "early"])
def _round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, weight_ptr, num_rows, num_features, size, largest,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """One program per row of `size` elements: its largest becomes `largest`. NaN stays NaN. Further
    programs read ahead AHEAD cache lines of each row of the weight, of 8 bits, that the rows will
    be multiplied by."""
    if AHEAD:
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


@triton.jit(do_not_specialize=["early"])
def _rotate_and_store_kernel(
    heads_ptr, table_ptr, positions_ptr, kv_ptr, slots_ptr, q_ptr,
    token_stride, head_stride, kv_slot,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (tokens, KV heads): a KV head with the query heads that share it. `HALF` of head_dim."""
    begin(PDL, early)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    dim = tl.arange(0, BLOCK_H)
    exists = dim < HALF
    place = token
    if positions_ptr is not None:
        place = tl.load(positions_ptr + token)
    angles = table_ptr + place * 4 * HALF
    cos = tl.load(angles + dim, mask=exists, other=0.0)[None, :]
    sin = tl.load(angles + 3 * HALF + dim, mask=exists, other=0.0)[None, :]

    row = tl.arange(0, BLOCK_G)  # the group's query heads, then the key
    head = tl.where(row < GROUP, kv_head * GROUP + row, NUM_KV_HEADS * GROUP + kv_head)
    source = heads_ptr + token * token_stride + (head * head_stride)[:, None] + dim[None, :]
    mask = (row <= GROUP)[:, None] & exists[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(q_ptr.dtype.element_ty)

    is_query = (row < GROUP)[:, None] & exists[None, :]
    q = q_ptr + (token * NUM_KV_HEADS * GROUP + head)[:, None] * 2 * HALF + dim[None, :]
    tl.store(q, turned, mask=is_query)
    tl.store(q + HALF, turned_second, mask=is_query)
    is_key = (row == GROUP)[:, None] & exists[None, :]
    key = kv_ptr + slot * kv_slot + kv_head * 2 * HALF + (row * 0)[:, None] + dim[None, :]
    tl.store(key, turned, mask=is_key)
    tl.store(key + HALF, turned_second, mask=is_key)

    v_head = NUM_KV_HEADS * (GROUP + 1) + kv_head
    source = heads_ptr + token * token_stride + v_head * head_stride + dim
    value = kv_ptr + slot * kv_slot + (NUM_KV_HEADS + kv_head) * 2 * HALF + dim
    tl.store(value, tl.load(source, mask=exists), mask=exists)
    tl.store(value + HALF, tl.load(source + HALF, mask=exists), mask=exists)


@triton.jit(do_not_specialize=["num_rows", "early"])
def _few_rows_kernel(
    x_ptr, weight_ptr, out_ptr, row_scales_ptr, scales_ptr, num_rows, out_features, in_features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    AHEAD: tl.constexpr, EXACT_K: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """x [num_rows, in_features] times the transpose of weight [out_features, in_features]: a
    program reads BLOCK_N rows of the weight, once. The blocks divide the features.

    row_scales, scales: of rows of x and of the weight if both have 8 bits, in float32; else None.
    AHEAD: cache lines of each row of the weight that are read ahead.
    GATED: of weight [2 * out_features, in_features], silu of the first half's product times that of
    the second, both rounded as products are; a program reads half of its rows from each."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.arange(0, BLOCK_M)
    feature = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK_K)
    first = weight_ptr + feature[:, None].to(tl.int64) * in_features
    if AHEAD:
        ITEMS: tl.constexpr = CACHE_LINE * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, AHEAD) * ITEMS, in_features - 1)[None, :]
        read_ahead(PDL, first + line)
        if GATED:
            read_ahead(PDL, first + out_features.to(tl.int64) * in_features + line)
    begin(PDL, early)
    weight = first + column[None, :]
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
class _FewRows:
    """The launch of `_few_rows_kernel`, chosen on an H100.

    Attributes:
        ahead: cache lines of each row of the weight that are read ahead.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    ahead: int = 0
    ahead_of_rounding: int = 0

    @classmethod
    def choose(
        cls,
        num_rows: int,
        out_features: int,
        in_features: int,
        shared_bytes: int,
        is_gated: bool = False,
        item_bytes: int = 2,
    ) -> _FewRows | None:
        """None for more than `MAX_FEW_ROWS`, or where no block divides the features.

        Args:
            shared_bytes: of shared memory that a program may take; with less than an H100's, fewer
                stages.
            item_bytes: of a number of x and of the weight; 1: up to `MAX_SCALED_ROWS`.
        """
        if num_rows > (MAX_SCALED_ROWS if item_bytes == 1 else MAX_FEW_ROWS):
            return None
        block_m = next(rows for rows in (16, 32, 64, MAX_SCALED_ROWS) if num_rows <= rows)
        if INTERPRETED:
            chosen = cls(block_m, 64, 64, 1, 4)
        elif item_bytes == 1:
            chosen = cls._scaled(block_m, out_features, in_features, is_gated)
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
    def _scaled(
        cls, block_m: int, out_features: int, in_features: int, is_gated: bool
    ) -> _FewRows:
        """The launch for numbers of 8 bits."""
        if block_m <= 32:
            if out_features >= 16384:
                return cls(block_m, 64, 256, 3, 4, 8)
            if in_features >= 8192:
                return cls(block_m, 32, 512, 5, 4, 8)
            return cls(block_m, 64 if out_features > 4224 else 32, 256, 5, 4, 8)
        if out_features >= 16384:
            return cls(block_m, 128, 128, 4, 4 if block_m == 64 else 8, 8)
        return cls(block_m, 64 if out_features > 4224 else 32, 256, 4, 4, 8)


class TritonOps:
    """Implements `LayerOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared_bytes = shared_memory_bytes(device)

    def _launch(self, num_programs: int) -> dict[str, int]:
        return dependent_launch(self._device, num_programs)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._few_rows(x, weight, bias, is_gated=False)
        return self._many_rows(x, weight, bias) if out is None else out

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = self._few_rows(x, weight, bias, is_gated=True)
        return self.silu_and_mul(self._many_rows(x, weight, bias)) if out is None else out

    def _many_rows(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not isinstance(weight, ScaledWeight):
            return F.linear(x, weight, bias)
        if x.shape[0] == 0:
            return x.new_empty((0, len(weight.codes)))
        codes, scales = self._rounded(x, weight.codes, 0)
        return torch._scaled_mm(
            codes, weight.codes.t(), scales, weight.scales.t(), bias=bias, out_dtype=x.dtype
        )

    def _rounded(
        self, x: torch.Tensor, weight: torch.Tensor, ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds each row of x [T, D] to 8 bits; returns its codes, and scales [T, 1]."""
        (num_rows, size), x = x.shape, x.contiguous()
        codes = torch.empty_like(x, dtype=CODES)
        scales = x.new_empty((num_rows, 1), dtype=torch.float32)
        if num_rows:
            num_programs = num_rows + triton.cdiv(len(weight) * ahead, LINES)
            _round_rows_kernel[(num_programs,)](
                x, codes, scales, weight, num_rows, len(weight), size, LARGEST,
                BLOCK=triton.next_power_of_2(size), AHEAD=ahead,
                num_warps=8 if size > 1024 else 4, **self._launch(num_programs),
            )  # fmt: skip
        return codes, scales

    def _few_rows(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor | None:
        """None where cuBLAS is to compute the product."""
        if bias is not None or x.dtype == torch.float32 or not x.is_contiguous():
            return None
        scaled = weight if isinstance(weight, ScaledWeight) else None
        numbers = weight.codes if isinstance(weight, ScaledWeight) else weight
        (num_rows, in_features), num_features = x.shape, len(numbers)
        shape = _FewRows.choose(
            num_rows, num_features, in_features, self._shared_bytes, is_gated, numbers.itemsize
        )
        if shape is None:
            return None
        out_features = num_features // 2 if is_gated else num_features
        out = x.new_empty((num_rows, out_features))
        x, row_scales = (
            (x, None)
            if scaled is None
            else self._rounded(x, numbers, shape.ahead_of_rounding)
        )
        scales = None if scaled is None else scaled.scales
        num_programs = num_features // shape.block_n
        _few_rows_kernel[(num_programs,)](
            x, numbers, out, row_scales, scales, num_rows, out_features, in_features,
            BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, GATED=is_gated,
            AHEAD=shape.ahead, EXACT_K=min(EXACT_COLUMNS, shape.block_k),
            num_warps=shape.num_warps, num_stages=shape.num_stages,
            **self._launch(num_programs),
        )  # fmt: skip
        return out

    def experts(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_chosen: int,
        normalizes: bool,
    ) -> torch.Tensor:
        if not x.shape[0]:
            return torch.empty_like(x)
        num_pairs, num_experts = x.shape[0] * num_chosen, scores.shape[1]
        tiles = ExpertTiles.choose(num_pairs, num_experts, x.itemsize, self._shared_bytes)
        return compute_experts(
            x, scores, gate_up, down, num_chosen, normalizes, tiles, self._launch
        )

    def rotation(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = weight.shape[0]
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        if x.numel() == 0:
            return out, total
        _add_rms_norm_kernel[(x.numel() // size,)](
            x, residual, weight, out, total, size, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 1024 else 4, **self._launch(x.numel() // size),
        )  # fmt: skip
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, size))
        if num_rows == 0:
            return out
        grid = (num_rows, triton.cdiv(size, MUL_BLOCK))
        launch = self._launch(grid[0] * grid[1])
        _silu_and_mul_kernel[grid](gate_up, out, size, BLOCK=MUL_BLOCK, **launch)
        return out

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        positions: torch.Tensor | None,
        kv: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, _, head_dim = heads.shape
        num_kv_heads = kv.shape[1] // 2
        group = heads.shape[1] // num_kv_heads - 2
        assert heads.stride(2) == 1
        assert kv.is_contiguous()
        q = heads.new_empty((num_tokens, num_kv_heads * group, head_dim))
        _rotate_and_store_kernel[(num_tokens, num_kv_heads)](
            heads, rotation, positions, kv, slots, q,
            heads.stride(0), heads.stride(1), kv.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HALF=head_dim // 2,
            BLOCK_G=triton.next_power_of_2(group + 1),
            BLOCK_H=triton.next_power_of_2(head_dim // 2), num_warps=1,
            **self._launch(num_tokens * num_kv_heads),
        )  # fmt: skip
        return q
