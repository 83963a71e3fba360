"""Attention by Triton kernels whose result for a row has the same bits whatever shares its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    ScoreForm,
)
from sglang.srt.layers.attention.triton_backend import TritonBackend
from sglang.srt.layers.attention.triton_ops.item_groups import ItemGroups, ItemRoom, RowLimits
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE
from sglang.srt.layers.attention.triton_ops.kernels import Paged, Tiles
from sglang.srt.layers.attention.triton_ops.parts_kernel import (
    Workspace,
    add_up_parts,
    attend_parts,
    num_parts,
)
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.layers.triton_launch import INTERPRETED, beside_each_other
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.platform import num_multiprocessors

FIRST_TILES = 2  # of KV in a part of the first length
LEAST_PROGRAMS = 3  # of an item's parts; with fewer, adding up costs more than they gain
WORKSPACE_BYTES = 128 << 20  # at most


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTiles:
    """Tiles of one block_n, each with block_m = 16 * num_warps; see `parts_kernel.py`.

    Attributes:
        narrow: for steps of requests that all feed so few rows.
        wide: for requests that feed few rows.
        many: for prompts outside of graphs.
    """

    narrow: Tiles
    wide: Tiles
    many: Tiles

    @classmethod
    def choose(cls, dtype: torch.dtype, head_dim: int, group: int) -> PartTiles:
        """Chooses tiles, by times on an H100. `group`: query heads that share a KV head."""
        if INTERPRETED:  # tiny, so that tiny batches cross every edge
            found = (16, 1), (32, 1), (64, 1)
            block_n = 16
        elif dtype == torch.float32:  # no tensor cores
            found = ((16, 1),) * 3
            block_n = 16
        elif head_dim > 128:
            found = (16, 2), (64, 2), (64, 2)
            block_n = 32
        else:
            found = (16, 2), (64, 3), (128, 2)
            block_n = 64
        narrow, wide, many = (
            Tiles(block_m=size, block_n=block_n, num_warps=size // 16, num_stages=stages)
            for block_m, stages in found
            for size in (max(block_m, triton.next_power_of_2(group)),)
        )
        return cls(narrow=narrow, wide=wide, many=many)


@dataclass(frozen=True, slots=True)
class _Group:
    """Items and their launch.

    Attributes:
        items: [I, 4] int32.
        num_programs: that share the parts of an item.
        room: parts of an item, and its packed rows, at most.
    """

    items: torch.Tensor
    tiles: Tiles
    num_programs: int
    room: tuple[int, int]


@dataclass(slots=True)
class _GraphItems:
    """The items that a graph reads with their limits and room, and the q_lens they are for."""

    limits: RowLimits
    room: ItemRoom
    numbers: torch.Tensor
    q_lens: list[int]


class RowIndependentBackend:
    """As `TritonBackend`, but the order in which a row's sums are added up depends on its position
    alone (`parts_kernel.py`). It has no masks for trees, whose rows lie at other positions than in
    the output, and reads a prefix that requests share for each of them."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        kv = kv_pool.kv[0]
        self._windows, self._kv_pool = tuple(windows), kv_pool
        self._table, self._device = req_to_token_pool.req_to_token, kv.device
        self._num_kv_heads, head_dim = kv.shape[1] // 2, kv.shape[2]
        self._group = num_heads // self._num_kv_heads
        self._tiles = tiles = PartTiles.choose(kv.dtype, head_dim, self._group)
        self._first_len = FIRST_TILES * tiles.wide.block_n
        self._num_programs = 16 if INTERPRETED else 2 * num_multiprocessors(self._device)
        few = tiles.wide.block_m // self._group
        self._limits = RowLimits(
            narrow=0, few=few, wide_item=few, many_item=tiles.many.block_m // self._group
        )
        parts = num_parts(self._table.shape[1], self._first_len)
        most = (2 * self._num_programs // LEAST_PROGRAMS + self._num_kv_heads) * parts
        most *= tiles.wide.block_m * (head_dim + 2)
        size = min(most, WORKSPACE_BYTES // 4)
        self._workspace = Workspace(size, head_dim, self._device)
        self._uniform: dict[tuple[int, int], torch.Tensor] = {}
        self._graph_items: dict[GraphKey, _GraphItems] = {}
        no_items = torch.empty((0, ITEM_SIZE), dtype=torch.int32, device=self._device)
        self._groups: list[_Group] = []
        self._paged = Paged(
            table=self._table,
            rows=no_items.new_empty(0),
            kv_lens=no_items.new_empty(0),
            kv_starts=kv_pool.kv_starts,
            outside=req_to_token_pool.outside,
            scores=scores,
        )

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return replace(
            TritonBackend.capabilities(),
            tree_masks=False,
            captures_trees=False,
            folds_rows=False,
            shares_kv=False,
        )

    def plan(self, batch: ForwardBatch) -> None:
        assert batch.ancestors is None, "Trees are refused at the start."
        self._paged = replace(
            self._paged, rows=batch.rows, kv_lens=batch.kv_lens, q_starts=batch.q_starts
        )
        key, longest = batch.graph_key, self._table.shape[1]
        if key is not None and key.is_uniform and key.width <= self._limits.few:
            self._plan_uniform(key.width, key.num_reqs, longest)
        elif key is not None:
            self._plan_graph(batch.q_lens, key, longest)
        elif len(set(batch.q_lens)) == 1 and batch.q_lens[0] <= self._limits.few:
            longest = max(batch.kv_len_upper_bounds)
            self._plan_uniform(batch.q_lens[0], len(batch.q_lens), longest)
        else:
            groups = ItemGroups.of(batch.q_lens, self._limits)
            items = to_device(groups.padded(groups.room), self._device, torch.int32)
            longest = max(batch.kv_len_upper_bounds)
            items = items.view(-1, ITEM_SIZE)
            self._set_groups(items, groups.room, self._limits, self._tiles.many, longest)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert q.stride(-1) == 1
        kv, window = self._kv_pool.kv[layer], self._windows[layer]
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        shared = self._paged, window
        launches = beside_each_other(len(self._groups))
        for group, launch in zip(self._groups, launches, strict=True):
            attend_parts(
                q, kv, out, group.items, *shared, group.tiles, launch, self._first_len,
                group.num_programs, group.room, self._workspace,
            )  # fmt: skip
        for group in self._groups:
            if group.num_programs > 1:
                add_up_parts(
                    q, kv, out, group.items, *shared, group.tiles, self._first_len,
                    group.room, self._workspace,
                )  # fmt: skip
        return out

    def _plan_uniform(self, q_len: int, count: int, longest: int) -> None:
        """Plans `count` requests of the same few rows, at addresses that never change."""
        share = triton.cdiv(count, self._table.shape[0])  # several requests per row are of blocks
        if (q_len, share) not in self._uniform:
            requests = range(share * self._table.shape[0])
            values = [number for i in requests for number in (i, i * q_len, q_len, q_len)]
            items = to_device(values, self._device, torch.int32)
            self._uniform[q_len, share] = items.view(-1, ITEM_SIZE)
        is_narrow = q_len * self._group <= self._tiles.narrow.block_m
        tiles = self._tiles.narrow if is_narrow else self._tiles.wide
        items = self._uniform[q_len, share][:count]
        self._groups = [self._few_rows(items, tiles, q_len, longest, count)]

    def _plan_graph(self, q_lens: list[int], key: GraphKey, longest: int) -> None:
        """Plans the items that the key has room for, at its own address; those of padding are
        empty."""
        if key not in self._graph_items:
            few = self._limits.few
            limits = RowLimits(
                narrow=0, few=key.width, wide_item=min(key.width, few), many_item=few
            )
            room = ItemRoom.of_graph(key, limits, by_bounds=key.is_packed)
            size = room.wide + room.narrow + room.many
            numbers = torch.zeros((size, ITEM_SIZE), dtype=torch.int32, device=self._device)
            self._graph_items[key] = _GraphItems(limits, room, numbers, [])
        held = self._graph_items[key]
        if held.q_lens != q_lens:
            overwrite(held.numbers, ItemGroups.of(q_lens, held.limits).padded(held.room))
            held.q_lens = list(q_lens)
        num_used = ItemRoom.of_graph(key, held.limits).wide
        tiles = self._tiles.wide
        self._set_groups(held.numbers, held.room, held.limits, tiles, longest, num_used)

    def _set_groups(
        self,
        items: torch.Tensor,
        room: ItemRoom,
        limits: RowLimits,
        many_tiles: Tiles,
        longest: int,
        num_used: int | None = None,
    ) -> None:
        """Sets the groups at the head of `items`, of which about `num_used` of few rows are not
        empty, or all if that is None."""
        wide, many = items[: room.wide], items[room.wide :][: room.many]
        self._groups = []
        if room.many:
            self._groups.append(_Group(many, many_tiles, 1, (0, 0)))
        if room.wide:
            used = room.wide if num_used is None else num_used
            few = self._few_rows(wide, self._tiles.wide, limits.wide_item, longest, used)
            self._groups.append(few)

    def _few_rows(
        self, items: torch.Tensor, tiles: Tiles, most_rows: int, longest: int, num_used: int
    ) -> _Group:
        """Plans items of up to most_rows rows, whose KV has up to `longest` positions."""
        parts, packed_rows = num_parts(longest, self._first_len), most_rows * self._group
        wanted = self._num_programs * (2 if tiles is self._tiles.narrow else 1)
        wanted = min(wanted // (num_used * self._num_kv_heads), parts)
        holds = self._workspace.holds(len(items), self._num_kv_heads, parts, packed_rows)
        if wanted < LEAST_PROGRAMS or not holds:
            wanted = 1
        return _Group(items, tiles, wanted, (parts, packed_rows))
