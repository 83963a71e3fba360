"""Attention of steps of one row per request to KV that several requests share, part of the Triton
backend: a program reads a prefix for a tile of requests, and not for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from sglang.srt.device_copies import overwrite
from sglang.srt.layers.attention.kv_splits import MAX_ROUNDS, choose_splits
from sglang.srt.layers.attention.triton_ops.kernels import (
    Paged,
    Tiles,
    attend_items_split,
    workspace_size,
)
from sglang.srt.layers.attention.triton_ops.shared_kernel import (
    MAX_SHARED_SPLITS,
    TILE_SIZE,
    SharedTiles,
    add_up_prefixes,
    attend_prefixes,
)
from sglang.srt.layers.attention.triton_tuning import Tuning
from sglang.srt.layers.triton_launch import beside_each_other
from sglang.srt.mem_cache.memory_pool import SharedPrefix

MAX_PROGRAMS = 512  # of tiles and KV heads; memory is reserved for them


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of a step; see `SharedTiles`, which has them on the device.

    Attributes:
        tiles: the numbers of each.
        members: requests, tile by tile.
        places, starts: of each row of the page table.
    """

    tiles: list[tuple[int, int, int]]
    members: list[int]
    places: list[int]
    starts: list[int]

    @classmethod
    def of(
        cls, prefixes: Sequence[SharedPrefix], tile_requests: int, max_tiles: int, num_rows: int
    ) -> TilePlan:
        """Cuts prefixes into tiles of nearly the same numbers of requests; those for which there is
        no room are left out.

        Args:
            num_rows: of the page table.
        """
        plan = cls([], [], [-1] * num_rows, [0] * num_rows)
        for prefix in prefixes:
            count = len(prefix.requests)
            num_tiles = -(-count // tile_requests)
            if len(plan.tiles) + num_tiles > max_tiles:
                continue
            for index in range(num_tiles):
                first, end = index * count // num_tiles, (index + 1) * count // num_tiles
                for place, row in enumerate(prefix.rows[first:end]):
                    plan.places[row] = len(plan.tiles) * tile_requests + place
                    plan.starts[row] = prefix.num_tokens
                plan.tiles.append((len(plan.members), end - first, prefix.num_tokens))
                plan.members.extend(prefix.requests[first:end])
        return plan


class SharedPrefixAttention:
    """Plans and attends such steps. The tiles of a step are at addresses that never change, so any
    graph may hold them.

    Args:
        kv: of a layer.
        group: query heads that share a KV head.
        num_rows: of the page table.
        own_workspace: float32, for requests' own KV; a larger one is made if it is too small.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        group: int,
        num_rows: int,
        tuning: Tuning,
        own_workspace: torch.Tensor,
    ) -> None:
        self._num_kv_heads, head_dim = kv.shape[1] // 2, kv.shape[2]
        self._tiles = tuning.shared
        self._num_multiprocessors = tuning.num_programs // 2
        self._num_programs = triton.cdiv(tuning.num_programs, self._num_kv_heads)
        self._max_tiles = max(1, MAX_PROGRAMS // self._num_kv_heads)
        self._tile_requests = tuning.shared.block_m // group
        self._num_rows = num_rows
        most = max(self._max_tiles * self._num_kv_heads, MAX_ROUNDS * self._num_multiprocessors)
        size = workspace_size(most, self._tiles.block_m, head_dim)
        own_size = workspace_size(num_rows * self._num_kv_heads, tuning.split.block_m, head_dim)
        self._workspace, own = (
            torch.full((each,), float("nan"), device=kv.device)
            for each in (size, own_size if own_size > own_workspace.numel() else 0)
        )
        self._own_workspace = own if own.numel() else own_workspace
        self._sizes = (4, self._max_tiles * TILE_SIZE, *[triton.cdiv(num_rows, 4) * 4] * 3)
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.int32, device=kv.device)
        counts, tiles, members, places, starts = self._numbers.split(self._sizes)
        self._shared = SharedTiles(
            counts=counts,
            tiles=tiles.view(-1, TILE_SIZE),
            members=members,
            places=places,
            starts=starts,
        )
        self._planned: list[SharedPrefix] | None = None
        self._items, self._own = self._numbers, (tuning.whole, 1)

    def plan(
        self, prefixes: list[SharedPrefix], items: torch.Tensor, own_tiles: Tiles, num_splits: int
    ) -> None:
        """Plans a step; one copy to the device if the last one had other prefixes.

        Args:
            items: [R, 4] int32, of the requests in their order.
            own_tiles, num_splits: of the KV after prefixes.
        """
        self._items, self._own = items, (own_tiles, num_splits)
        if prefixes == self._planned:
            return
        self._planned = prefixes
        plan = TilePlan.of(prefixes, self._tile_requests, self._max_tiles, self._num_rows)
        lens = [triton.cdiv(tile[2], self._tiles.block_n) for tile in plan.tiles]
        num_parts = choose_splits(
            lens, self._num_kv_heads, self._num_multiprocessors, MAX_SHARED_SPLITS
        )
        sections = (
            [len(plan.tiles), num_parts],
            [number for tile in plan.tiles for number in (*tile, 0)],
            plan.members,
            plan.places,
            plan.starts,
        )
        numbers = list[int]()
        for size, section in zip(self._sizes, sections, strict=True):
            numbers += section
            numbers += [0] * (size - len(section))
        overwrite(self._numbers, numbers)

    def forward(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, paged: Paged) -> None:
        """Attends in a layer without a window; see `AttentionBackend.forward`."""
        first, second = beside_each_other(2)
        shared, (own_tiles, num_splits) = self._shared, self._own
        attend_prefixes(
            q, kv, paged, shared, self._tiles, first, self._num_programs, self._workspace
        )
        after = replace(paged, kv_starts=shared.starts)
        own = num_splits, self._own_workspace
        attend_items_split(q, kv, self._items, after, None, own_tiles, second, *own)
        prefix = self._tiles, self._workspace
        add_up_prefixes(q, kv, out, paged, shared, (own_tiles, *own), prefix)
