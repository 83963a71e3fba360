"""Paged attention by our own Triton kernels, for any ragged batch, with lengths on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from sglang.srt.layers.attention.base_attn_backend import AttentionCapabilities, GraphSupport
from sglang.srt.layers.attention.triton_kernels import (
    INTERPRETED,
    ITEM_SIZE,
    Paged,
    Tiles,
    attend_items,
    attend_items_split,
    store_kv,
    workspace_size,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# The interpreter's tl.dot takes the bits of bfloat16 for integers.
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))


SPARE_ITEMS = 1 << 15  # blocks of prompt rows in a step: graphs hold the buffer's address


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What depends on the GPU, the dtype and the heads.

    Attributes:
        extend: tiles for requests that feed many rows.
        split: tiles for those that feed few; its block_m is the most that a step may choose.
        min_split: KV positions that a program of a split takes at least.
        num_programs: programs that fill the GPU; the KV of few requests is split until there are
            so many.
        max_splits: of one request's KV.
    """

    extend: Tiles
    split: Tiles
    min_split: int
    num_programs: int
    max_splits: int

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Tuning:
        """`group`: query heads that share a KV head; they stay in one block."""
        least_m = triton.next_power_of_2(group)
        if INTERPRETED:  # tiny, so that tiny batches cross every edge
            tiles = Tiles(block_m=max(16, least_m), block_n=16, num_warps=4, num_stages=1)
            return cls(extend=tiles, split=tiles, min_split=16, num_programs=16, max_splits=8)
        # Block sizes at which the compiler spills no registers on an H100.
        if dtype == torch.float32:  # no tensor cores
            extend = Tiles(block_m=32, block_n=16, num_warps=8, num_stages=1)
            split = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
        elif head_dim > 128:
            extend = Tiles(block_m=64, block_n=32, num_warps=4, num_stages=2)
            split = extend
        else:
            num_warps = 4 if head_dim <= 64 else 8
            extend = Tiles(block_m=128, block_n=64, num_warps=num_warps, num_stages=2)
            split = Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3)
        return cls(
            extend=replace(extend, block_m=max(extend.block_m, least_m)),
            split=replace(split, block_m=max(split.block_m, least_m)),
            min_split=128,
            num_programs=2 * torch.cuda.get_device_properties(device).multi_processor_count,
            max_splits=64,
        )


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Grids and tiles of a step, known on the host without reading the device. The items of few
    rows come first in the buffer.

    Attributes:
        num_split_items, num_extend_items: work items of each kernel.
        split_block_m: packed rows of an item of few rows.
        num_splits: of the KV of each item of few rows; 1: a single program writes the result.
    """

    num_split_items: int
    num_extend_items: int
    split_block_m: int
    num_splits: int


class TritonBackend:
    """Requests that feed few rows have their KV split among programs; the others' rows are cut into
    blocks that each go over all the KV they see. Both kinds may share a step.

    All that the kernels read lies in buffers of this object, which keep their addresses until a
    step needs larger ones: they start large enough for one item per row of the page table.

    There is no argument for the mask of a tree of drafts yet (`tree_masks` is False).
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        windows: Sequence[int | None],
    ) -> None:
        self._windows = tuple(windows)
        self._table = req_to_token_pool.req_to_token
        self._kv_pool = kv_pool
        self._device = kv_pool.kv[0].device
        self._num_kv_heads = kv_pool.kv[0].shape[1] // 2
        self._group = 0  # query heads per KV head; known from the first layer's queries on
        self._tuning: Tuning | None = None
        self._shape = LaunchShape(0, 0, 16, 1)
        self._q_lens: list[int] = []
        self._bounds: list[int] = []
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        num_rows = self._table.shape[0]
        self._items = self._buffer((num_rows + SPARE_ITEMS, ITEM_SIZE), torch.int32)
        self._rows = self._buffer((num_rows,), torch.int64)
        self._kv_lens = self._buffer((num_rows,), torch.int64)
        self._workspace = self._buffer((0,), torch.float32)

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            dtypes=frozenset(DTYPES),
            page_sizes=None,
            graph=GraphSupport.RAGGED_Q,
            needs_host_lens=False,
            tree_masks=False,
        )

    def plan(self, batch: ForwardBatch) -> None:
        num_requests = len(batch.q_lens)
        self._rows = self._filled(self._rows, batch.rows, num_requests)
        self._kv_lens = self._filled(self._kv_lens, batch.kv_lens, num_requests)
        self._slots = batch.slots
        self._q_lens, self._bounds = batch.q_lens, batch.kv_len_upper_bounds
        if self._tuning is not None:
            self._cut(self._tuning)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        tuning = self._tuning_for(q)
        kv, window, shape = self._kv_pool.kv[layer], self._windows[layer], self._shape
        paged = Paged(table=self._table, rows=self._rows, kv_lens=self._kv_lens)
        store_kv(k, v, kv, self._slots)
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        few = self._items[: shape.num_split_items]
        many = self._items[shape.num_split_items :][: shape.num_extend_items]
        if len(many):
            attend_items(q, kv, out, many, paged, window, tuning.extend)
        if len(few):
            tiles = replace(tuning.split, block_m=shape.split_block_m)
            if shape.num_splits == 1:
                attend_items(q, kv, out, few, paged, window, tiles)
            else:
                attend_items_split(
                    q, kv, out, few, paged, window, tiles,
                    shape.num_splits, tuning.min_split, self._workspace,
                )  # fmt: skip
        return out

    def _tuning_for(self, q: torch.Tensor) -> Tuning:
        """The tuning for queries [T, num_heads, head_dim]. The first ones tell how many query heads
        share a KV head; then the planned step can be cut."""
        group = q.shape[1] // self._num_kv_heads
        if self._tuning is None or group != self._group:
            self._group = group
            self._tuning = tuning = Tuning.choose(self._device, q.dtype, q.shape[2], group)
            # Room for every step whose KV is split: graphs hold the address.
            size = workspace_size(1, 1, tuning.num_programs, tuning.split.block_m, q.shape[2])
            if len(self._workspace) < size:
                self._workspace = self._buffer((size,), torch.float32).fill_(float("nan"))
            self._cut(self._tuning)
        return self._tuning

    def _cut(self, tuning: Tuning) -> None:
        """Work items of the planned step, with one copy to the device, and its launch shape."""
        few: list[int] = []
        many: list[int] = []
        most_few_rows, longest, first_token = 1, 1, 0
        block_q = tuning.extend.block_m // self._group
        for request, q_len in enumerate(self._q_lens):
            if q_len * self._group <= tuning.split.block_m:
                few += (request, first_token, q_len, q_len)
                most_few_rows = max(most_few_rows, q_len)
                longest = max(longest, self._bounds[request])
            else:  # the last rows see most: their programs start first
                for first in reversed(range(0, q_len, block_q)):
                    rows = min(block_q, q_len - first)
                    many += (request, first_token + first, rows, q_len - first)
            first_token += q_len
        num_few = len(few) // ITEM_SIZE
        self._shape = LaunchShape(
            num_split_items=num_few,
            num_extend_items=len(many) // ITEM_SIZE,
            split_block_m=max(16, triton.next_power_of_2(most_few_rows * self._group)),
            num_splits=self._num_splits(tuning, num_few, longest),
        )
        items = torch.tensor(
            few + many, dtype=torch.int32, pin_memory=self._device.type == "cuda"
        ).view(-1, ITEM_SIZE)
        self._items = self._filled(self._items, items, len(items))
        self._reserve_workspace()

    def _num_splits(self, tuning: Tuning, num_items: int, longest: int) -> int:
        """Splits of the KV of items of few rows, of up to `longest` positions."""
        if num_items == 0:
            return 1
        wanted = tuning.num_programs // (num_items * self._num_kv_heads)
        useful = triton.cdiv(longest, tuning.min_split)
        return max(1, min(wanted, useful, tuning.max_splits))

    def _reserve_workspace(self) -> None:
        shape = self._shape
        if shape.num_splits == 1:
            return
        size = workspace_size(
            shape.num_split_items,
            self._num_kv_heads,
            shape.num_splits,
            shape.split_block_m,
            self._kv_pool.kv[0].shape[2],
        )
        if len(self._workspace) < size:
            # What no split has written must not be read: it would show.
            self._workspace = self._buffer((size,), torch.float32).fill_(float("nan"))

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _filled(self, buffer: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
        """`buffer`, or a larger one if `count` entries need it, with `values` at its start."""
        if len(buffer) < count:
            buffer = self._buffer((2 * count, *buffer.shape[1:]), buffer.dtype)
        buffer[:count].copy_(values, non_blocking=True)
        return buffer
