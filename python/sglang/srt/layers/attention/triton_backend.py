"""Paged attention by our own Triton kernels, for any ragged batch, with lengths on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.attention.kv_splits import MAX_ROUNDS, MAX_SPLITS, choose_splits
from sglang.srt.layers.attention.prompt_attention import PromptAttention
from sglang.srt.layers.attention.shared_prefixes import SharedPrefixAttention
from sglang.srt.layers.attention.triton_ops.item_groups import ItemGroups, ItemRoom, RowLimits
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE
from sglang.srt.layers.attention.triton_ops.kernels import (
    Paged,
    Shares,
    Tiles,
    attend_items,
    attend_items_split,
    workspace_size,
)
from sglang.srt.layers.attention.triton_ops.sums_kernel import add_up_splits
from sglang.srt.layers.attention.triton_tuning import Tuning
from sglang.srt.layers.forward_batch import MIXED, RAGGED, ForwardBatch, GraphKey
from sglang.srt.layers.triton_launch import INTERPRETED, beside_each_other
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool, SharedPrefix

MIN_SPLITS = 3  # with fewer, adding up costs more than they gain
# Programs of a packed graph's wide items, most of them empty, for each program that fills the GPU.
MAX_WIDE_PROGRAMS = 4
# The interpreter's tl.dot takes the bits of bfloat16 for integers.
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))


@dataclass(frozen=True, slots=True)
class FewRows:
    """Items of requests that feed few rows, and their launch.

    Attributes:
        items: [I, 4] int32.
        num_splits: splits of the KV of each item; 1: a single program writes the result.
        workspace: for splits; no other kernel of the step uses it.
    """

    items: torch.Tensor
    tiles: Tiles
    num_splits: int
    workspace: torch.Tensor


@dataclass(frozen=True, slots=True)
class ManyRows:
    """Items of requests that feed many rows, and their launch.

    Attributes:
        items: [I, 4] int32.
        shared: None: one program per item and KV head.
    """

    items: torch.Tensor
    tiles: Tiles
    shared: Shares | None


class TritonBackend:
    """Requests that feed few rows have their KV split among programs; the others' rows are cut into
    blocks that each go over all the KV they see. Both kinds may share a step: the kernels of the
    groups of items (`item_groups.py`) run beside each other. On Hopper, `PromptAttention` attends
    the requests that feed most. Up to MAX_TREE_ROWS rows may be a tree of drafts;
    without one in the step, the kernels are compiled without masks for it.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        self._windows = tuple(windows)
        self._kv_pool, self._table = kv_pool, req_to_token_pool.req_to_token
        self._device = kv_pool.kv[0].device
        self._num_kv_heads = kv_pool.kv[0].shape[1] // 2
        self._group = num_heads // self._num_kv_heads
        head_dim, dtype = kv_pool.kv[0].shape[2], kv_pool.kv[0].dtype
        self._tuning = tuning = Tuning.choose(self._device, dtype, head_dim, self._group)
        self._limits = RowLimits(
            narrow=tuning.split.block_m // self._group,
            few=tuning.few.block_m // self._group,
            wide_item=tuning.few.block_m // self._group,
            many_item=tuning.extend.block_m // self._group,
        )
        # One for each group of few rows: their kernels run beside each other. Filled with NaN, so
        # that reading a place that no split has written shows.
        self._wide_workspace, self._narrow_workspace = (
            torch.full(
                (workspace_size(num_programs, tiles.block_m, head_dim),),
                float("nan"),
                device=self._device,
            )
            for num_programs, tiles in (
                (MAX_WIDE_PROGRAMS * tuning.num_programs, tuning.few),
                (tuning.num_split_programs, tuning.split),
            )
        )
        self._prompts: PromptAttention | None = None
        if scores.softcap is None and PromptAttention.can_serve(kv_pool.kv[0], num_heads):
            self._prompts = PromptAttention(
                kv_pool, num_heads, self._table.shape[1], tuning.num_programs // 2
            )
        self._num_multiprocessors = tuning.num_programs // 2
        num_shares = 0 if self._prompts else MAX_ROUNDS * self._num_multiprocessors
        size = workspace_size(num_shares, tuning.few.block_m, head_dim)
        self._many_workspace = torch.full((size,), float("nan"), device=self._device)
        self._shared: SharedPrefixAttention | None = None
        self._shares_kv = False
        self._uniform: dict[tuple[int, int], torch.Tensor] = {}
        self._graph_items: dict[GraphKey, _GraphItems] = {}
        self._no_items = torch.empty((0, ITEM_SIZE), dtype=torch.int32, device=self._device)
        self._few: list[FewRows] = []
        self._many = ManyRows(self._no_items, tuning.extend, None)
        self._paged = Paged(
            table=self._table,
            rows=self._no_items.new_empty(0),
            kv_lens=self._no_items.new_empty(0),
            kv_starts=kv_pool.kv_starts,
            outside=req_to_token_pool.outside,
            scores=scores,
        )

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            dtypes=frozenset(DTYPES),
            page_sizes=None,
            graph=GraphSupport.RAGGED_Q,
            tree_masks=True,
            captures_trees=True,
            reads_q_starts=True,
            captures_plans=True,
            reads_kv_starts=True,
            folds_rows=True,
            shares_kv=True,
        )

    @property
    def few_rows(self) -> Sequence[FewRows]:
        """Returns how the items of few rows of the planned step are launched."""
        return tuple(self._few)

    def plan(self, batch: ForwardBatch) -> None:
        self._paged = replace(
            self._paged,
            rows=batch.rows,
            kv_lens=batch.kv_lens,
            ancestors=batch.ancestors,
            tree_starts=batch.tree_starts,
            q_starts=batch.q_starts,
        )
        self._shares_kv = False
        prompts = self._plan_prompts(batch)
        if batch.graph_key is not None:
            self._plan_graph(batch, batch.graph_key, prompts)
        elif len(set(batch.q_lens)) == 1 and batch.q_lens[0] <= self._limits.few:
            longest = max(batch.kv_len_upper_bounds)
            self._plan_uniform(batch.q_lens[0], len(batch.q_lens), longest, batch.num_folded)
            if batch.shared_prefixes:
                self._plan_shared(batch.shared_prefixes)
        else:
            self._plan_ragged(batch, prompts)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert q.stride(-1) == 1
        few, many, paged = self._few, self._many, self._paged
        kv, window = self._kv_pool.kv[layer], self._windows[layer]
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        if self._shares_kv and self._shared is not None and window is None:
            self._shared.forward(q, kv, out, paged)
            return out
        if self._prompts is not None:
            self._prompts.forward(layer, q, out, paged, window)
        launches = iter(beside_each_other(len(few) + (len(many.items) > 0)))
        if len(many.items):
            attend_items(
                q, kv, out, many.items, paged, window, many.tiles, next(launches), many.shared
            )  # fmt: skip
        for group in few:
            if group.num_splits == 1:
                attend_items(q, kv, out, group.items, paged, window, group.tiles, next(launches))
            else:
                more = group.tiles, next(launches), group.num_splits, group.workspace
                attend_items_split(q, kv, group.items, paged, window, *more)
        for group in few:
            if group.num_splits > 1:
                sums = group.tiles, group.num_splits, group.workspace
                add_up_splits(q, kv, out, group.items, paged, window, *sums)
        if len(many.items) and many.shared is not None and self._prompts is None:
            shared, most = many.shared, (many.tiles, MAX_SPLITS, many.shared.workspace)
            add_up_splits(
                q, kv, out, many.items, paged, window, *most, device_splits=shared.num_splits
            )
        return out

    def _plan_prompts(self, batch: ForwardBatch) -> frozenset[int]:
        """Returns the requests that `PromptAttention` attends."""
        if self._prompts is None:
            return frozenset()
        q_lens, kv_lens = batch.q_lens, batch.kv_len_upper_bounds
        if batch.graph_key is not None:
            return self._prompts.plan_graph(batch.graph_key, q_lens, kv_lens)
        return self._prompts.plan(q_lens, kv_lens)

    def _plan_uniform(self, q_len: int, count: int, longest: int, num_folded: int = 1) -> None:
        """Plans `count` requests of the same few rows, each with `num_folded` times the heads."""
        items, most_rows = self._uniform_items(q_len, count), q_len * num_folded
        if most_rows <= self._limits.few:
            self._few = [self._few_rows(items, most_rows, longest, self._wide_workspace)]
        else:  # larger than the workspace is made for
            size = triton.next_power_of_2(most_rows * self._group)
            tiles = replace(self._tuning.few, block_m=size)
            self._few = [FewRows(items, tiles, 1, self._wide_workspace)]
        self._many = ManyRows(self._no_items, self._tuning.extend, None)

    def _plan_shared(self, prefixes: list[SharedPrefix]) -> None:
        """Plans prefixes of requests of one row each, which `_plan_uniform` has planned."""
        if self._kv_pool.kv_starts is not None:
            return
        if self._shared is None:
            kv, num_rows = self._kv_pool.kv[0], self._table.shape[0]
            self._shared = SharedPrefixAttention(
                kv, self._group, num_rows, self._tuning, self._wide_workspace
            )
        (own,) = self._few
        self._shared.plan(prefixes, own.items, own.tiles, own.num_splits)
        self._shares_kv = True

    def _plan_ragged(self, batch: ForwardBatch, prompts: frozenset[int]) -> None:
        """Plans all items of requests that are not in `prompts`, with one copy to the device."""
        limits, bounds = self._limits, batch.kv_len_upper_bounds
        groups = ItemGroups.of(batch.q_lens, limits, prompts)
        room = groups.room
        items = to_device(groups.padded(room), self._device, torch.int32).view(-1, ITEM_SIZE)
        longest_wide, longest_narrow = (
            max((bounds[request] for request in group[::ITEM_SIZE]), default=0)
            for group in (groups.wide, groups.narrow)
        )
        self._set_groups(items, room, limits, longest_wide, longest_narrow, room.wide)
        self._many = ManyRows(items[room.wide + room.narrow :], self._tuning.extend, None)

    def _plan_graph(self, batch: ForwardBatch, key: GraphKey, prompts: frozenset[int]) -> None:
        """Plans the items that the key has room for, at its own address; those of padding and of
        `prompts` are empty."""
        longest = self._table.shape[1]
        if key.is_uniform and key.width <= self._limits.few:
            self._plan_uniform(key.width, key.num_reqs, longest, batch.num_folded)
            if key.shares_kv:
                self._plan_shared(batch.shared_prefixes)
            return
        if key not in self._graph_items:
            limits = self._graph_limits(key)
            room = ItemRoom.of_graph(key, limits, by_bounds=key.is_packed)
            size = room.wide + room.narrow + room.many
            # Those of a step without requests, and the number of splits of many rows.
            numbers = self._no_items.new_zeros((size + 1, ITEM_SIZE))
            numbers[size, 0] = 1
            self._graph_items[key] = _GraphItems(limits, room, numbers, ([], prompts, 1))
        held = self._graph_items[key]
        num_splits = self._splits_of_many(batch, held.limits)
        if held.step != (batch.q_lens, prompts, num_splits):
            groups = ItemGroups.of(batch.q_lens, held.limits, prompts)
            overwrite(held.numbers, [*groups.padded(held.room), num_splits, 0, 0, 0])
            held.step = list(batch.q_lens), prompts, num_splits
        num_wide = ItemRoom.of_graph(key, held.limits).wide
        self._set_groups(held.numbers, held.room, held.limits, longest, longest, num_wide)
        # Most of this room is empty, and a program for each would take longer than the work. One
        # per multiprocessor leaves room for the items of few rows beside them.
        many = held.numbers[held.room.wide + held.room.narrow : -1]
        shared = Shares(
            num_splits=held.numbers[-1, :1],
            num_programs=triton.cdiv(self._num_multiprocessors, self._num_kv_heads),
            workspace=self._many_workspace,
        )
        self._many = ManyRows(many, self._tuning.few, shared)

    def _splits_of_many(self, batch: ForwardBatch, limits: RowLimits) -> int:
        """Chooses the splits of items of many rows; `PromptAttention` leaves few of them."""
        if self._prompts is not None:
            return 1
        block_n = self._tuning.few.block_n
        tiles = [
            triton.cdiv(bound - q_len + min(first + limits.many_item, q_len), block_n)
            for q_len, bound in zip(batch.q_lens, batch.kv_len_upper_bounds, strict=True)
            if q_len > limits.few
            for first in range(0, q_len, limits.many_item)
        ]
        return choose_splits(tiles, self._num_kv_heads, self._num_multiprocessors)

    def _graph_limits(self, key: GraphKey) -> RowLimits:
        """Steps of few requests whose KV is split have no narrow items unless there are prompts:
        two more launches, of mostly empty items, would cost more than wide tiles do."""
        narrow = min(self._limits.narrow, key.width)
        is_split = self._split(key.num_reqs, key.width, self._table.shape[1])[1] > 1
        if key.width > narrow and not (key.tag == MIXED or (key.tag == RAGGED and not is_split)):
            narrow = 0
        return RowLimits(
            narrow=narrow,
            few=key.width,
            wide_item=min(key.width, self._limits.few),
            many_item=self._limits.few,
        )

    def _set_groups(
        self,
        items: torch.Tensor,
        room: ItemRoom,
        limits: RowLimits,
        longest_wide: int,
        longest_narrow: int,
        num_wide: int,
    ) -> None:
        """Sets the groups of few rows at the head of `items`, whose requests have KV for up to
        `longest_wide` or `longest_narrow` positions. About `num_wide` of the wide ones are not
        empty."""
        wide, narrow = items[: room.wide], items[room.wide :][: room.narrow]
        self._few = []
        if room.wide:
            self._few.append(
                self._few_rows(wide, limits.wide_item, longest_wide, self._wide_workspace, num_wide)
            )
        if room.narrow:
            self._few.append(
                self._few_rows(narrow, limits.narrow, longest_narrow, self._narrow_workspace)
            )

    def _uniform_items(self, q_len: int, count: int) -> torch.Tensor:
        """[count, 4]: the items of any step in which each request feeds q_len rows. They are never
        moved, since graphs hold their address."""
        share = triton.cdiv(count, self._table.shape[0])  # several requests per row are of blocks
        if (q_len, share) not in self._uniform:
            requests = range(share * self._table.shape[0])
            values = [number for i in requests for number in (i, i * q_len, q_len, q_len)]
            items = to_device(values, self._device, torch.int32)
            self._uniform[q_len, share] = items.view(-1, ITEM_SIZE)
        return self._uniform[q_len, share][:count]

    def _few_rows(
        self,
        items: torch.Tensor,
        most_rows: int,
        longest: int,
        workspace: torch.Tensor,
        num_used: int | None = None,
    ) -> FewRows:
        """Plans items of up to most_rows rows, whose KV has up to `longest` positions; about
        `num_used` are not empty, or all if that is None."""
        tiles, num_splits = self._split(len(items), most_rows, longest, num_used)
        return FewRows(items, tiles, num_splits, workspace)

    def _split(
        self, num_items: int, most_rows: int, longest: int, num_used: int | None = None
    ) -> tuple[Tiles, int]:
        """Chooses the tiles of such items, and the splits of their KV."""
        tuning = self._tuning
        is_narrow = most_rows <= self._limits.narrow
        # Each size is compiled anew, so there are no sizes between.
        tiles = tuning.split if is_narrow else tuning.few
        num_programs = tuning.num_split_programs if is_narrow else tuning.num_programs
        wanted = num_programs // ((num_used or num_items) * self._num_kv_heads)
        room = MAX_WIDE_PROGRAMS * tuning.num_programs // (num_items * self._num_kv_heads)
        num_splits = min(wanted, room, triton.cdiv(longest, tiles.block_n), tuning.max_splits)
        if num_splits >= MIN_SPLITS:
            return tiles, num_splits
        if is_narrow:
            is_crowded = num_items * self._num_kv_heads > 1.5 * tuning.num_programs
            tiles = tuning.crowded if is_crowded else tuning.whole
        return tiles, 1


@dataclass(slots=True)
class _GraphItems:
    """The items that a graph reads with their limits and room, and the step that they are for: its
    q_lens, requests that `PromptAttention` takes, and splits. A step of the same copies nothing."""

    limits: RowLimits
    room: ItemRoom
    numbers: torch.Tensor
    step: tuple[list[int], frozenset[int], int]
