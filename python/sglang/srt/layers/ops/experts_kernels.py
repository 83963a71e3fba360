"""Kernels of mixtures of experts: the choice of experts, rows by expert, products and their sum;
`expert_products.py` launches them.

While kernels are compiled ahead (`KernelsAhead`), some run on what others have not written. So what
is used as an address is compared with its bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.ops.activation import silu_times
from sglang.srt.layers.triton_launch import begin


@triton.jit(do_not_specialize=["early"])
def route_kernel(
    scores_ptr, experts_ptr, weights_ptr, order_ptr, blocks_ptr, num_experts,
    NUM_CHOSEN: tl.constexpr, NORMALIZES: tl.constexpr, IS_ALONE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """One program per row: the experts of its highest softmax(scores), of equal ones the first.

    IS_ALONE: there is no other row, so each pair is a block."""
    begin(PDL, early)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    exists = expert < num_experts
    scores = tl.load(scores_ptr + row * num_experts + expert, mask=exists, other=float("-inf"))
    scores = scores.to(tl.float32)
    odds = tl.exp(scores - tl.max(scores, 0))
    odds /= tl.sum(odds, 0)
    # Numbers that are not negative are ordered as their bits are; no number is above all.
    bits = (odds.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    keys = tl.where(exists, bits * BLOCK_E + (BLOCK_E - 1 - expert), -1)
    place = tl.arange(0, BLOCK_C)
    best = tl.zeros([BLOCK_C], dtype=tl.int64)
    for number in range(NUM_CHOSEN):
        highest = tl.max(keys, 0)
        best = tl.where(place == number, highest, best)
        keys = tl.where(keys == highest, -1, keys)
    is_chosen = place < NUM_CHOSEN
    chosen = BLOCK_E - 1 - (best % BLOCK_E).to(tl.int32)
    weights = (best // BLOCK_E).to(tl.int32).to(tl.float32, bitcast=True)
    weights = tl.where(is_chosen, weights, 0.0)
    if NORMALIZES:
        weights /= tl.sum(weights, 0)
    pair = row * NUM_CHOSEN + place
    tl.store(experts_ptr + pair, chosen, mask=is_chosen)
    tl.store(weights_ptr + pair, weights.to(weights_ptr.dtype.element_ty), mask=is_chosen)
    if IS_ALONE:
        tl.store(order_ptr + place, place, mask=is_chosen)
        tl.store(blocks_ptr + place, chosen, mask=is_chosen)
        tl.store(blocks_ptr + NUM_CHOSEN + place, place, mask=is_chosen)
        tl.store(blocks_ptr + 2 * NUM_CHOSEN + place, 1, mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "early"])
def group_kernel(
    experts_ptr, order_ptr, blocks_ptr, num_pairs, num_blocks, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """One program per expert: its pairs in their order, behind those of the experts before it."""
    begin(PDL, early)
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        exists = (found >= 0) & (found < num_experts)
        counts += tl.histogram(tl.where(exists, found, 0), BLOCK_E, mask=exists)
    blocks = tl.cdiv(counts, BLOCK_M)
    place = tl.sum(tl.where(expert < own, counts, 0), 0)
    end = place + tl.sum(tl.where(expert == own, counts, 0), 0)
    block = blocks_ptr + tl.sum(tl.where(expert < own, blocks, 0), 0)
    for first in range(place, end, BLOCK_M):
        tl.store(block, own)
        tl.store(block + num_blocks, first)
        tl.store(block + 2 * num_blocks, tl.minimum(end - first, BLOCK_M))
        block += 1
    if own == num_experts - 1:
        for number in range(tl.sum(blocks, 0), num_blocks):
            tl.store(blocks_ptr + 2 * num_blocks + number, 0)
    if end > place:
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
            is_own = (found == own).to(tl.int32)
            rank = tl.cumsum(is_own, 0) - 1
            tl.store(order_ptr + place + rank, pair, mask=is_own != 0)
            place += tl.sum(is_own, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "early"])
def product_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, blocks_ptr, num_pairs, num_blocks, num_experts,
    out_features, in_features, NUM_CHOSEN: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
    PDL: tl.constexpr, early,
):  # fmt: skip
    """A block's rows times the transpose of BLOCK_N rows of its expert's weight
    [out_features, in_features]; a block's programs are side by side.

    GATED: x [T, in_features] by row; of weights [2 * out_features, in_features], silu of the first
    half's product times that of the second, both rounded as products are; out by order. Else x by
    order, and out by pair.
    IS_EVEN: BLOCK_K divides in_features."""
    begin(PDL, early)
    num_tiles = tl.cdiv(out_features, BLOCK_N)
    tile = tl.program_id(0) % num_tiles
    block = blocks_ptr + tl.program_id(0) // num_tiles
    count = tl.load(block + 2 * num_blocks)
    if count <= 0:
        return
    expert = tl.load(block)
    if (expert < 0) | (expert >= num_experts):
        return
    first = tl.load(block + num_blocks)
    num_features = out_features * 2 if GATED else out_features
    weight_ptr += expert.to(tl.int64) * num_features * in_features
    place = first + tl.arange(0, BLOCK_M)
    exists = (tl.arange(0, BLOCK_M) < count) & (place >= 0) & (place < num_pairs)
    pair = tl.load(order_ptr + place, mask=exists, other=-1)
    exists &= (pair >= 0) & (pair < num_pairs)
    if GATED:
        source, target = pair // NUM_CHOSEN, place
    else:
        source, target = place, pair

    feature = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    # The last features are read again where there are no more.
    read = tl.minimum(feature, out_features - 1)[:, None].to(tl.int64) * in_features
    weight = weight_ptr + read + column[None, :]
    x = x_ptr + source[:, None].to(tl.int64) * in_features + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        is_column = (column < in_features - start)[None, :] | IS_EVEN
        values = tl.load(x, mask=exists[:, None] & is_column, other=0.0)
        w = tl.load(weight, mask=is_column, other=0.0)
        total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
        if GATED:
            below = weight + out_features.to(tl.int64) * in_features
            w = tl.load(below, mask=is_column, other=0.0)
            second = tl.dot(values, tl.trans(w), second, input_precision="ieee")
        weight += BLOCK_K
        x += BLOCK_K
    result = total.to(out_ptr.dtype.element_ty)
    if GATED:
        result = silu_times(result, second.to(result.dtype))
    out = out_ptr + target[:, None].to(tl.int64) * out_features + feature[None, :]
    tl.store(out, result, mask=exists[:, None] & (feature < out_features)[None, :])


@triton.jit(do_not_specialize=["early"])
def sum_kernel(
    products_ptr, weights_ptr, out_ptr, size,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (rows, blocks of the `size` features): a row's pairs by weight, in their order."""
    begin(PDL, early)
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = feature < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + number
        product = tl.load(products_ptr + pair * size + feature, mask=exists, other=0.0)
        total += tl.load(weights_ptr + pair).to(tl.float32) * product.to(tl.float32)
    tl.store(out_ptr + row * size + feature, total.to(out_ptr.dtype.element_ty), mask=exists)
