"""Implements `LayerOps`: the operations between matrix products, each in one Triton kernel, and
matrix products of few rows. All of it is bound by memory, or by the time that a launch takes; sums
are float32.

On GPUs that can, a kernel is launched while the one before it ends (`PDL`: CUDA's programmatic
dependent launch) and waits for it before it reads anything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang.srt.layers.layer_runtime import HeadNorms
from sglang.srt.layers.ops.activation import silu_times
from sglang.srt.layers.ops.expert_products import ExpertTiles, compute_experts
from sglang.srt.layers.ops.few_rows import product_of_few_rows, round_rows
from sglang.srt.layers.ops.ordered_products import OrderedProducts
from sglang.srt.layers.scaled_weight import ScaledWeight, Weight
from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.platform import shared_memory_bytes

MUL_BLOCK = 1024


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


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, is_key, dim, exists):
    """The weights of some dimensions of each head."""
    of_query = tl.load(q_norm_ptr + dim, mask=exists, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm_ptr + dim, mask=exists, other=0.0).to(tl.float32)
    return tl.where(is_key, of_key[None, :], of_query[None, :])


@triton.jit(do_not_specialize=["early"])
def _rotate_and_store_kernel(
    heads_ptr, table_ptr, positions_ptr, kv_ptr, slots_ptr, q_ptr, q_norm_ptr, k_norm_ptr,
    token_stride, head_stride, kv_slot, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (tokens, KV heads): a KV head with the query heads that share it. `HALF` of head_dim.
    `q_norm_ptr`: heads are normalized before they are rotated."""
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
    if q_norm_ptr is not None:
        squares = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = tl.rsqrt(squares + eps)[:, None]
        is_key = (row == GROUP)[:, None]
        weight = _norm_weights(q_norm_ptr, k_norm_ptr, is_key, dim, exists)
        second_weight = _norm_weights(q_norm_ptr, k_norm_ptr, is_key, HALF + dim, exists)
        first = (first * scale * weight).to(q_ptr.dtype.element_ty).to(tl.float32)
        second = (second * scale * second_weight).to(q_ptr.dtype.element_ty).to(tl.float32)
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


class TritonOps:
    """Implements `LayerOps`.

    Args:
        products: None: torch's library computes products of many rows, in the fastest order.
    """

    def __init__(self, device: torch.device, products: OrderedProducts | None = None) -> None:
        self._device = device
        self._shared_bytes = shared_memory_bytes(device)
        self._products = products

    def _launch(self, num_programs: int) -> dict[str, int]:
        return dependent_launch(self._device, num_programs)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._few_rows(x, weight, bias, is_gated=False)
        return self._many_rows(x, weight, bias) if out is None else out

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = self._few_rows(x, weight, bias, is_gated=True)
        if out is None and bias is None and not isinstance(weight, ScaledWeight):
            out = None if self._products is None else self._products.gated_linear(x, weight)
        return self.silu_and_mul(self._many_rows(x, weight, bias)) if out is None else out

    def _many_rows(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not isinstance(weight, ScaledWeight):
            many_rows = F.linear if self._products is None else self._products.linear
            return many_rows(x, weight, bias)
        if x.shape[0] == 0:
            return x.new_empty((0, len(weight.codes)))
        codes, scales = round_rows(x, weight, 0, self._launch)
        return torch._scaled_mm(
            codes, weight.codes.t(), scales, weight.scales.t(), bias=bias, out_dtype=x.dtype
        )

    def _few_rows(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor | None:
        """None where another kernel is to compute the product."""
        if bias is not None or x.dtype == torch.float32 or not x.is_contiguous():
            return None
        return product_of_few_rows(x, weight, is_gated, self._shared_bytes, self._launch)

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
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        num_tokens, _, head_dim = heads.shape
        num_kv_heads = kv.shape[1] // 2
        group = heads.shape[1] // num_kv_heads - 2
        assert heads.stride(2) == 1
        assert kv.is_contiguous()
        q = heads.new_empty((num_tokens, num_kv_heads * group, head_dim))
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        _rotate_and_store_kernel[(num_tokens, num_kv_heads)](
            heads, rotation, positions, kv, slots, q, q_norm, k_norm,
            heads.stride(0), heads.stride(1), kv.stride(0), eps,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HALF=head_dim // 2,
            BLOCK_G=triton.next_power_of_2(group + 1),
            BLOCK_H=triton.next_power_of_2(head_dim // 2), num_warps=1,
            **self._launch(num_tokens * num_kv_heads),
        )  # fmt: skip
        return q


def row_independent_ops(device: torch.device) -> TritonOps:
    """Makes operations whose result for a row has the same bits for any number of rows."""
    return TritonOps(device, OrderedProducts(shared_memory_bytes(device)))
