"""Mixtures of experts in four launches, or five for several rows: the choice of experts, rows by
expert, two products and a sum.

A pair is a row and one of its K chosen experts: pair p is of row p // K. Pairs are ordered by
expert, and those of one expert are computed in blocks of `block_m`, which read the expert's weights
once. Sizes of grids depend on the number of rows alone, so recorded graphs hold for any choice; a
block without pairs ends at once. Sums are float32, and no result depends on which program ends
first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton

from sglang.srt.layers.ops.experts_kernels import (
    group_kernel,
    product_kernel,
    route_kernel,
    sum_kernel,
)
from sglang.srt.layers.triton_launch import INTERPRETED, Launch

LEAST_BINS = 32  # of a histogram
FEW_PAIRS, CHUNK = 1024, 4096  # pairs that a program reads at once
SUM_BLOCK = 512
BLOCK_FIELDS = 3  # expert, place of the first pair, number of pairs


class Tile(NamedTuple):
    """The part of a weight that a program of a product reads at once, and how."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The launches of `product_kernel`, chosen on an H100.

    Attributes:
        block_m: pairs of a block.
        gate_up: of the gated product, which reads two such tiles.
    """

    block_m: int
    gate_up: Tile
    down: Tile

    @classmethod
    @cache
    def choose(
        cls, num_pairs: int, num_experts: int, item_bytes: int, shared_bytes: int
    ) -> ExpertTiles:
        """Chooses blocks that hold the pairs of an average expert, within what is fast.

        Args:
            shared_bytes: of shared memory that a program may take; with less than an H100's, fewer
                stages.
        """
        if INTERPRETED:
            return cls(16, Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
        block_m = next((m for m in (16, 32, 64) if m * num_experts >= num_pairs), 128)
        if item_bytes > 2:  # products without tensor cores
            chosen = cls(16, Tile(32, 64, 4, 2), Tile(32, 64, 4, 2))
        elif block_m == 16:
            chosen = cls(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))
        elif block_m == 32:
            chosen = cls(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))
        elif block_m == 64:
            chosen = cls(64, Tile(64, 64, 4, 4), Tile(128, 64, 8, 4))
        else:
            chosen = cls(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 3))
        return chosen.within(item_bytes, shared_bytes)

    def within(self, item_bytes: int, shared_bytes: int) -> ExpertTiles:
        """The same with as many stages as there is shared memory for."""

        def fitting(tile: Tile, num_reads: int) -> Tile:
            stage = (self.block_m + num_reads * tile.block_n) * tile.block_k * item_bytes
            return tile._replace(num_stages=max(1, min(tile.num_stages, shared_bytes // stage)))

        return replace(self, gate_up=fitting(self.gate_up, 2), down=fitting(self.down, 1))


class Pairs(NamedTuple):
    """The pairs of a step.

    Attributes:
        weights: [T, K], in the type of the rows.
        order: [T * K] int32: the pairs, ordered by expert.
        blocks: [BLOCK_FIELDS, number of blocks] int32; those behind the last one have no pairs.
    """

    weights: torch.Tensor
    order: torch.Tensor
    blocks: torch.Tensor


def choose_pairs(
    x: torch.Tensor,
    scores: torch.Tensor,
    num_chosen: int,
    normalizes: bool,
    block_m: int,
    launch: Launch,
) -> Pairs:
    """Chooses the experts of each row of x [T, hidden_size] and orders the pairs; see
    `LayerOps.experts`."""
    num_rows, num_experts = scores.shape
    num_pairs, is_alone = num_rows * num_chosen, num_rows == 1
    most_used = min(num_experts, num_pairs)
    num_blocks = most_used + (num_pairs - most_used) // block_m
    experts = torch.empty((num_pairs,), dtype=torch.int32, device=x.device)
    order, blocks = torch.empty_like(experts), experts.new_empty((BLOCK_FIELDS, num_blocks))
    weights = x.new_empty((num_rows, num_chosen))
    block_e = max(LEAST_BINS, triton.next_power_of_2(num_experts))
    route_kernel[(num_rows,)](
        scores.contiguous(), experts, weights, order, blocks, num_experts,
        NUM_CHOSEN=num_chosen, NORMALIZES=normalizes, IS_ALONE=is_alone, BLOCK_E=block_e,
        BLOCK_C=triton.next_power_of_2(num_chosen), num_warps=1 if block_e <= 512 else 4,
        **launch(num_rows),
    )  # fmt: skip
    if not is_alone:
        group_kernel[(num_experts,)](
            experts, order, blocks, num_pairs, num_blocks, num_experts, BLOCK_M=block_m,
            BLOCK_E=block_e, CHUNK=FEW_PAIRS if num_pairs <= FEW_PAIRS else CHUNK,
            num_warps=4 if num_pairs <= FEW_PAIRS else 8, **launch(num_experts),
        )  # fmt: skip
    return Pairs(weights, order, blocks)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: Pairs,
    block_m: int,
    tile: Tile,
    launch: Launch,
    is_gated: bool,
) -> torch.Tensor:
    """The product of each pair and the weight of its expert, see `product_kernel`.

    Args:
        weight: [num_experts, features, in_features].

    Returns:
        [T * K, out_features], by order if gated, else by pair.
    """
    num_experts, out_features, in_features = weight.shape
    out_features = out_features // 2 if is_gated else out_features
    num_pairs, num_blocks = pairs.order.shape[0], pairs.blocks.shape[1]
    out = x.new_empty((num_pairs, out_features))
    num_programs = num_blocks * triton.cdiv(out_features, tile.block_n)
    product_kernel[(num_programs,)](
        x, weight, out, pairs.order, pairs.blocks, num_pairs, num_blocks, num_experts,
        out_features, in_features, NUM_CHOSEN=pairs.weights.shape[1], GATED=is_gated,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        IS_EVEN=in_features % tile.block_k == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch(num_programs),
    )  # fmt: skip
    return out


def sum_of_pairs(products: torch.Tensor, weights: torch.Tensor, launch: Launch) -> torch.Tensor:
    """Sums products [T * K, hidden_size] by weights [T, K]: [T, hidden_size]."""
    (num_rows, num_chosen), size = weights.shape, products.shape[1]
    out = products.new_empty((num_rows, size))
    grid = num_rows, triton.cdiv(size, SUM_BLOCK)
    sum_kernel[grid](
        products, weights, out, size, NUM_CHOSEN=num_chosen, BLOCK=SUM_BLOCK,
        **launch(grid[0] * grid[1]),
    )  # fmt: skip
    return out


def compute_experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_chosen: int,
    normalizes: bool,
    tiles: ExpertTiles,
    launch: Launch,
) -> torch.Tensor:
    """Implements `LayerOps.experts` for at least one row."""
    x, block_m = x.contiguous(), tiles.block_m
    pairs = choose_pairs(x, scores, num_chosen, normalizes, block_m, launch)
    rows = product(x, gate_up, pairs, block_m, tiles.gate_up, launch, is_gated=True)
    products = product(rows, down, pairs, block_m, tiles.down, launch, is_gated=False)
    return sum_of_pairs(products, pairs.weights, launch)
