"""Block sizes of the Triton backend, and the number of programs of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from sglang.srt.layers.attention.triton_ops.kernels import Tiles
from sglang.srt.layers.triton_launch import INTERPRETED
from sglang.srt.platform import num_multiprocessors, shared_memory_bytes

# Shared memory that tiles of 64 x 128 take, which hold two of K and V.
LARGE_SHARED_BYTES = 150 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Tiles (see `Tiles`) and limits, by GPU, dtype and heads.

    Packed rows are a request's rows times the query heads that share a KV head. A request feeds few
    rows if its packed rows fit into one tile of `few`, else many. Items of few rows are narrow if
    their packed rows fit into one tile of `split`, else wide.

    Attributes:
        extend: for requests that feed many rows, without a graph.
        few: for the same in a graph, whose rows are so few that larger tiles would leave the GPU
            idle; and for wide items.
        split: for narrow items whose KV is split.
        whole: for the same without a split, while the GPU has room for all programs at once.
        crowded: for the same when it has not.
        shared: for prefixes that requests share.
        num_programs: programs of all items that fill the GPU.
        num_split_programs: the KV of few requests is split until there are this many, of narrow
            items; of wide ones until there are `num_programs`.
        max_splits: the most parts of one request's KV.
    """

    extend: Tiles
    few: Tiles
    split: Tiles
    whole: Tiles
    crowded: Tiles
    shared: Tiles
    num_programs: int
    num_split_programs: int
    max_splits: int

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Tuning:
        """Chooses the tuning. `group`: query heads that share a KV head; they stay in one block."""
        least_m = triton.next_power_of_2(group)
        if INTERPRETED:  # tiny, so that tiny batches cross every edge
            tiles = Tiles(block_m=max(16, least_m), block_n=16, num_warps=4, num_stages=1)
            return cls(
                extend=tiles,
                few=replace(tiles, block_m=2 * tiles.block_m),
                split=tiles,
                whole=tiles,
                crowded=tiles,
                shared=replace(tiles, block_m=2 * tiles.block_m),
                num_programs=16,
                num_split_programs=16,
                max_splits=8,
            )
        # Block sizes at which the compiler spills no registers on an H100.
        if dtype == torch.float32:  # no tensor cores
            extend = Tiles(block_m=32, block_n=16, num_warps=8, num_stages=1)
            few = split = whole = crowded = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
        elif head_dim > 128:
            extend = few = Tiles(block_m=64, block_n=32, num_warps=4, num_stages=2)
            split = whole = crowded = Tiles(block_m=16, block_n=32, num_warps=4, num_stages=2)
        else:
            num_warps = 4 if head_dim <= 64 else 8
            extend = Tiles(block_m=128, block_n=64, num_warps=num_warps, num_stages=2)
            few = Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3)
            split = whole = Tiles(block_m=16, block_n=64, num_warps=2, num_stages=2)
            crowded = Tiles(block_m=16, block_n=32, num_warps=1, num_stages=3)
        has_room = shared_memory_bytes(device) >= LARGE_SHARED_BYTES
        is_large = has_room and dtype != torch.float32 and head_dim <= 128
        shared = Tiles(block_m=64, block_n=128, num_warps=4, num_stages=2) if is_large else few
        return cls(
            extend=replace(extend, block_m=max(extend.block_m, least_m)),
            few=replace(few, block_m=max(few.block_m, least_m)),
            split=split,
            whole=whole,
            crowded=crowded,
            shared=replace(shared, block_m=max(shared.block_m, least_m)),
            num_programs=2 * num_multiprocessors(device),
            num_split_programs=4 * num_multiprocessors(device),
            max_splits=64,
        )
