"""Paged attention by our own Triton kernels, for any ragged batch, with lengths on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.layers.attention.base_attn_backend import AttentionCapabilities, GraphSupport
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE, pack_rows
from sglang.srt.layers.attention.triton_ops.kernels import (
    Paged,
    Tiles,
    attend_items,
    attend_items_split,
    workspace_size,
)
from sglang.srt.layers.forward_batch import MIXED, ForwardBatch, GraphKey
from sglang.srt.layers.triton_launch import INTERPRETED, ParallelLaunch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.platform import num_multiprocessors

MIN_SPLITS = 3  # fewer gain less than adding them up costs
# The interpreter's tl.dot takes the bits of bfloat16 for integers.
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Tiles (see `Tiles`) and limits, by GPU, dtype and heads.

    Packed rows are a request's rows times the query heads that share a KV head. A request feeds few
    rows if its packed rows fit into one tile of `few`, else many.

    Attributes:
        extend: for requests that feed many rows, without a graph.
        few: for the same in a graph, whose rows are so few that larger tiles would leave the GPU
            idle; and for requests that feed few rows, but too many for the next three.
        split: for requests whose packed rows fit into one tile of it, and whose KV is split.
        whole: for the same without a split, while the GPU has room for all programs at once.
        crowded: for the same when it has not.
        num_programs: programs that fill the GPU; the KV of few requests is split until there are
            so many.
        max_splits: the most parts of one request's KV.
    """

    extend: Tiles
    few: Tiles
    split: Tiles
    whole: Tiles
    crowded: Tiles
    num_programs: int
    max_splits: int

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Tuning:
        """`group`: query heads that share a KV head; they stay in one block."""
        least_m = triton.next_power_of_2(group)
        if INTERPRETED:  # tiny, so that tiny batches cross every edge
            tiles = Tiles(block_m=max(16, least_m), block_n=16, num_warps=4, num_stages=1)
            return cls(
                extend=tiles,
                few=tiles,
                split=tiles,
                whole=tiles,
                crowded=tiles,
                num_programs=16,
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
            split = Tiles(block_m=16, block_n=32, num_warps=4, num_stages=2)
            whole = Tiles(block_m=16, block_n=64, num_warps=2, num_stages=2)
            crowded = Tiles(block_m=16, block_n=32, num_warps=1, num_stages=3)
        return cls(
            extend=replace(extend, block_m=max(extend.block_m, least_m)),
            few=replace(few, block_m=max(few.block_m, least_m)),
            split=split,
            whole=whole,
            crowded=crowded,
            num_programs=2 * num_multiprocessors(device),
            max_splits=64,
        )


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Grids and tiles of a step, known on the host without reading the device. The items of few
    rows come first in the buffer.

    Attributes:
        num_split_items, num_extend_items: work items of few rows, and of many.
        tiles: of items of few rows.
        num_splits: of the KV of each item of few rows; 1: a single program writes the result.
        extend_programs: of each KV head, for items of many rows in a graph; None: one per item.
    """

    num_split_items: int
    tiles: Tiles
    num_splits: int
    num_extend_items: int = 0
    extend_programs: int | None = None


class TritonBackend:
    """Requests that feed few rows have their KV split among programs; the others' rows are cut into
    blocks that each go over all the KV they see. Both kinds may share a step. Either may be a tree
    of drafts; without one in the step, the kernels are compiled without masks for it.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
    ) -> None:
        self._windows = tuple(windows)
        self._table = req_to_token_pool.req_to_token
        self._kv_pool = kv_pool
        self._device = kv_pool.kv[0].device
        self._num_kv_heads = kv_pool.kv[0].shape[1] // 2
        self._group = num_heads // self._num_kv_heads
        head_dim, dtype = kv_pool.kv[0].shape[2], kv_pool.kv[0].dtype
        self._tuning = tuning = Tuning.choose(self._device, dtype, head_dim, self._group)
        # Filled with NaN, so that reading what no split has written shows.
        size = workspace_size(tuning.num_programs, tuning.few.block_m, head_dim)
        self._workspace = torch.full((size,), float("nan"), device=self._device)
        self._uniform: dict[int, torch.Tensor] = {}
        self._graph_items: dict[GraphKey, _GraphItems] = {}
        self._shape = LaunchShape(0, tuning.few, 1)
        self._items = torch.empty((0, ITEM_SIZE), dtype=torch.int32, device=self._device)
        self._paged = Paged(
            table=self._table,
            rows=self._items.new_empty(0),
            kv_lens=self._items.new_empty(0),
            outside=req_to_token_pool.outside,
        )

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            dtypes=frozenset(DTYPES),
            page_sizes=None,
            graph=GraphSupport.RAGGED_Q,
            needs_host_lens=False,
            tree_masks=True,
        )

    def plan(self, batch: ForwardBatch) -> None:
        self._paged = replace(
            self._paged, rows=batch.rows, kv_lens=batch.kv_lens, ancestors=batch.ancestors
        )
        if batch.graph_key is not None:
            self._plan_graph(batch, batch.graph_key)
        elif len(set(batch.q_lens)) == 1 and self._is_few(batch.q_lens[0]):
            count, q_len = len(batch.q_lens), batch.q_lens[0]
            self._items = self._uniform_items(q_len, count)
            self._shape = self._split_shape(count, q_len, max(batch.kv_len_upper_bounds))
        else:
            self._plan_ragged(batch)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert q.stride(-1) == 1
        tuning, shape, paged = self._tuning, self._shape, self._paged
        kv, window = self._kv_pool.kv[layer], self._windows[layer]
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        few = self._items[: shape.num_split_items]
        many = self._items[shape.num_split_items :][: shape.num_extend_items]
        if len(many):
            launch = ParallelLaunch(with_next=len(few) > 0)
            num_programs = shape.extend_programs
            tiles = tuning.extend if num_programs is None else tuning.few
            attend_items(q, kv, out, many, paged, window, tiles, launch, num_programs)
        if len(few):
            launch = ParallelLaunch(with_previous=len(many) > 0)
            if shape.num_splits == 1:
                attend_items(q, kv, out, few, paged, window, shape.tiles, launch)
            else:
                attend_items_split(
                    q, kv, out, few, paged, window, shape.tiles, launch,
                    shape.num_splits, self._workspace,
                )  # fmt: skip
        return out

    def _is_few(self, q_len: int) -> bool:
        return q_len * self._group <= self._tuning.few.block_m

    def _plan_ragged(self, batch: ForwardBatch) -> None:
        """Work items of few rows, then those of many, with one copy to the device."""
        few: list[int] = []
        many: list[int] = []
        most_rows, longest = 1, 1
        block_q = self._tuning.extend.block_m // self._group
        starts = accumulate(batch.q_lens, initial=0)
        for request, (start, q_len) in enumerate(zip(starts, batch.q_lens, strict=False)):
            if self._is_few(q_len):
                few += (request, start, q_len, q_len)
                most_rows = max(most_rows, q_len)
                longest = max(longest, batch.kv_len_upper_bounds[request])
            else:  # the last rows see most: their programs start first
                many += _cut(request, start, q_len, block_q)
        self._shape = replace(
            self._split_shape(len(few) // ITEM_SIZE, most_rows, longest),
            num_extend_items=len(many) // ITEM_SIZE,
        )
        self._items = to_device(few + many, self._device, torch.int32).view(-1, ITEM_SIZE)

    def _plan_graph(self, batch: ForwardBatch, key: GraphKey) -> None:
        """The items that the key has room for, at its own address; those of padding are empty."""
        tuning = self._tuning
        most_q = tuning.few.block_m // self._group
        block_q = min(key.width, most_q)
        if key.is_uniform and self._is_few(key.width):
            self._items = self._uniform_items(key.width, key.num_reqs)
            self._shape = self._split_shape(key.num_reqs, key.width, self._table.shape[1])
            return
        num_few = key.num_reqs * triton.cdiv(key.width, block_q)
        num_many = key.num_tokens // most_q + key.num_reqs if key.tag == MIXED else 0
        if key not in self._graph_items:
            room = self._items.new_empty((num_few + num_many, ITEM_SIZE))
            self._graph_items[key] = _GraphItems(room, [])
        held = self._graph_items[key]
        if held.q_lens != batch.q_lens:
            few, many = _few_and_many(batch.q_lens, key.width, block_q, most_q)
            few += [0] * (num_few * ITEM_SIZE - len(few))
            many += [0] * (num_many * ITEM_SIZE - len(many))
            has_room = (len(few), len(many)) == (num_few * ITEM_SIZE, num_many * ITEM_SIZE)
            assert has_room, "More rows than the graph has room for."
            overwrite(held.items, few + many)
            held.q_lens = list(batch.q_lens)
        self._items = held.items
        shape = self._split_shape(num_few, block_q, self._table.shape[1])
        # Most of this room is empty, and a program for each would take longer than the work. One
        # per multiprocessor leaves room for the items of few rows beside them.
        self._shape = replace(
            shape,
            num_extend_items=num_many,
            extend_programs=triton.cdiv(tuning.num_programs, 2 * self._num_kv_heads),
        )

    def _uniform_items(self, q_len: int, count: int) -> torch.Tensor:
        """[count, 4]: the items of any step in which each request feeds q_len rows. They stay where
        they are, since graphs know their address."""
        if q_len not in self._uniform:
            requests = range(self._table.shape[0])
            values = [number for i in requests for number in (i, i * q_len, q_len, q_len)]
            items = to_device(values, self._device, torch.int32)
            self._uniform[q_len] = items.view(-1, ITEM_SIZE)
        return self._uniform[q_len][:count]

    def _split_shape(self, num_items: int, block_q: int, longest: int) -> LaunchShape:
        """For items of up to block_q rows, whose KV has up to `longest` positions."""
        tuning = self._tuning
        is_narrow = block_q * self._group <= tuning.split.block_m
        # Each size is compiled anew, so there is none between.
        tiles = tuning.split if is_narrow else tuning.few
        num_splits = 1
        if num_items > 0:
            wanted = tuning.num_programs // (num_items * self._num_kv_heads)
            num_splits = min(wanted, triton.cdiv(longest, tiles.block_n), tuning.max_splits)
            if num_splits < MIN_SPLITS:
                num_splits = 1
        if is_narrow and num_splits == 1:
            is_crowded = num_items * self._num_kv_heads > 1.5 * tuning.num_programs
            tiles = tuning.crowded if is_crowded else tuning.whole
        return LaunchShape(num_items, tiles, num_splits)


@dataclass(slots=True)
class _GraphItems:
    """The items that a graph reads, and the q_lens that they are for: a step of the same lengths
    copies nothing."""

    items: torch.Tensor
    q_lens: list[int]


def _few_and_many(
    q_lens: Sequence[int], width: int, block_q: int, most_q: int
) -> tuple[list[int], list[int]]:
    """Items of requests that feed up to `width` rows, of at most block_q rows each; and of the
    others, of at most most_q."""
    few: list[int] = []
    many: list[int] = []
    starts = accumulate(q_lens, initial=0)
    for request, (start, q_len) in enumerate(zip(starts, q_lens, strict=False)):
        if q_len <= width:
            few += _cut(request, start, q_len, block_q)
        else:
            many += _cut(request, start, q_len, most_q)
    return few, many


def _cut(request: int, start: int, q_len: int, block_q: int) -> list[int]:
    """Items of at most block_q rows of a request whose first token is `start`, the last rows
    first."""
    items: list[int] = []
    for first in reversed(range(0, q_len, block_q)):
        rows = pack_rows(min(block_q, q_len - first), first)
        items += (request, start + first, rows, q_len - first)
    return items
