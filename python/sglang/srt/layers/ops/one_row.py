"""The product of one row and a small weight: without tensor cores, so that a program may read a few
rows of the weight, and enough programs read at the same time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin

BLOCK_N = 4
MIN_BLOCK_K, MAX_BLOCK_K = 512, 2048
MOST_FEATURES = 16384, 8192  # of larger weights `_few_rows_kernel` reads as fast


@triton.jit(do_not_specialize=["early"])
def one_row_kernel(
    x_ptr, weight_ptr, out_ptr, in_features,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """x [in_features] times the transpose of BLOCK_N rows of weight [out_features, in_features].
    The blocks divide the features."""
    begin(PDL, early)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    weight = weight_ptr + feature[:, None].to(tl.int64) * in_features + column[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        w = tl.load(weight + start, eviction_policy="evict_first").to(tl.float32)
        total += w * tl.load(x_ptr + start + column).to(tl.float32)[None, :]
    tl.store(out_ptr + feature, tl.sum(total, 1).to(out_ptr.dtype.element_ty))


def product_of_one_row(
    x: torch.Tensor, weight: torch.Tensor, launch: Callable[[int], dict[str, int]]
) -> torch.Tensor | None:
    """Computes `LayerOps.linear` of contiguous x without a bias; None where there are more rows, or
    another kernel is as fast."""
    (num_rows, in_features), out_features = x.shape, len(weight)
    block_k = min(MAX_BLOCK_K, in_features & -in_features)
    if num_rows != 1 or block_k < MIN_BLOCK_K or out_features % BLOCK_N:
        return None
    if out_features >= MOST_FEATURES[0] or in_features >= MOST_FEATURES[1]:
        return None
    out = x.new_empty((1, out_features))
    num_programs = out_features // BLOCK_N
    one_row_kernel[(num_programs,)](
        x, weight, out, in_features, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_warps=4,
        **launch(num_programs),
    )  # fmt: skip
    return out
