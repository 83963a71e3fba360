"""What a layer does between its matrix products, each in one Triton kernel. All of it is bound by
memory, or by the time that a launch takes; sums are float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MUL_BLOCK = 1024


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, size, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of `size` elements."""
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


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Grid (rows, blocks of the `size` outputs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    gate = tl.load(gate_up_ptr + row * 2 * size + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + place, mask=mask, other=0.0)
    activated = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out_ptr + row * size + place, activated * up, mask=mask)


@triton.jit
def _rotate_and_store_kernel(
    heads_ptr, table_ptr, positions_ptr, kv_ptr, slots_ptr, q_ptr,
    token_stride, head_stride, kv_slot,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, KV heads): a KV head with the query heads that share it. `HALF` of head_dim."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    dim = tl.arange(0, BLOCK_H)
    exists = dim < HALF
    angles = table_ptr + tl.load(positions_ptr + token) * 4 * HALF
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


class TritonOps:
    """See `LayerOps` for what each does."""

    def rotation(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = weight.shape[0]
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        _add_rms_norm_kernel[(x.numel() // size,)](
            x, residual, weight, out, total, size, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 1024 else 4,
        )  # fmt: skip
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, size))
        grid = (num_rows, triton.cdiv(size, MUL_BLOCK))
        _silu_and_mul_kernel[grid](gate_up, out, size, BLOCK=MUL_BLOCK)
        return out

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        positions: torch.Tensor,
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
        )  # fmt: skip
        return q
