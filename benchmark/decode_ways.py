"""Attention of decodes: as the backend plans it for a graph, and with other tiles and splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmark.attention_inputs import DecodeInputs, Heads
from sglang.srt.device_copies import to_device
from sglang.srt.layers.attention.triton_backend import FewRows, TritonBackend
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE, pack_rows
from sglang.srt.layers.attention.triton_ops.kernels import (
    Tiles,
    attend_items,
    attend_items_split,
    workspace_size,
)
from sglang.srt.layers.attention.triton_ops.sums_kernel import add_up_splits
from sglang.srt.layers.attention.triton_tuning import Tuning
from sglang.srt.layers.triton_launch import ParallelLaunch

Call = Callable[[], torch.Tensor]  # one layer of one set; returns [R, num_heads * head_dim]

SWEPT_TILES = (
    Tiles(block_m=16, block_n=32, num_warps=4, num_stages=2),
    Tiles(block_m=16, block_n=64, num_warps=2, num_stages=2),
    Tiles(block_m=16, block_n=64, num_warps=4, num_stages=3),
    Tiles(block_m=16, block_n=32, num_warps=2, num_stages=3),
)
SWEPT_SPLITS = (2, 4, 8, 16, 33, 64)
MAX_PROGRAMS = 8192  # of a launch; more have never been faster, and need much memory for their sums


class Variant(NamedTuple):
    """Tiles, and the parts that the KV of a request is split into."""

    tiles: Tiles
    num_splits: int

    @property
    def name(self) -> str:
        tiles = self.tiles
        sizes = f"{tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps"
        return f"{sizes}, {tiles.num_stages} stages, splits {self.num_splits}"


def tuning_of(heads: Heads) -> Tuning:
    """What the backend chooses from."""
    return Tuning.choose(heads.device, heads.dtype, heads.head_dim, heads.group)


def variants(heads: Heads, tuning: Tuning, num_requests: int) -> list[Variant]:
    """What is tried: unsplit KV with the backend's tiles for it, and all swept tiles and splits
    that make at most MAX_PROGRAMS programs."""
    least_m = tuning.split.block_m
    unsplit = [Variant(tiles, 1) for tiles in (tuning.whole, tuning.crowded)]
    split = [
        Variant(replace(tiles, block_m=max(tiles.block_m, least_m)), num_splits)
        for tiles in SWEPT_TILES
        for num_splits in SWEPT_SPLITS
        if num_requests * heads.num_kv_heads * num_splits <= MAX_PROGRAMS
    ]
    return list(dict.fromkeys(unsplit + split))


def planned_calls(inputs: DecodeInputs) -> tuple[list[Call], Variant]:
    """Of each set, what a graph of decodes captures of a layer; and what the plan has chosen."""
    windows = [None]
    backend = TritonBackend(inputs.requests, inputs.pool, inputs.heads.num_heads, windows)

    def call_of(index: int) -> Call:
        def call() -> torch.Tensor:
            backend.plan(inputs.batches[index])  # its items are on the device: nothing is copied
            return backend.forward(0, inputs.q)

        return call

    backend.plan(inputs.batches[0])
    (group,) = backend.few_rows
    chosen = Variant(group.tiles, group.num_splits)
    return [call_of(index) for index in range(len(inputs.batches))], chosen


def variant_calls(inputs: DecodeInputs, variant: Variant) -> list[Call]:
    """The same with given tiles and splits."""
    heads, (tiles, num_splits), count = inputs.heads, variant, inputs.shape.num_requests
    numbers = [number for i in range(count) for number in (i, i, pack_rows(1, 0), 1)]
    size = workspace_size(count * heads.num_kv_heads * num_splits, tiles.block_m, heads.head_dim)
    group = FewRows(
        items=to_device(numbers, heads.device, torch.int32).view(-1, ITEM_SIZE),
        tiles=tiles,
        num_splits=num_splits,
        workspace=torch.empty(size if num_splits > 1 else 0, device=heads.device),
    )
    return [_call_of(inputs, group, index) for index in range(len(inputs.batches))]


def _call_of(inputs: DecodeInputs, group: FewRows, index: int) -> Call:
    q, kv, paged = inputs.q, inputs.pool.kv[0], inputs.paged(inputs.batches[index])
    items, tiles, num_splits, workspace = (
        group.items,
        group.tiles,
        group.num_splits,
        group.workspace,
    )

    def call() -> torch.Tensor:
        out = torch.empty_like(q).flatten(1)
        if num_splits == 1:
            attend_items(q, kv, out, items, paged, None, tiles, ParallelLaunch())
        else:
            attend_items_split(
                q, kv, items, paged, None, tiles, ParallelLaunch(), num_splits, workspace
            )
            add_up_splits(q, kv, out, items, paged, None, tiles, num_splits, workspace)
        return out

    return call
