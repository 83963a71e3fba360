"""Attention of the requests of a step that feed many rows, on Hopper GPUs: their K and V are
gathered once per layer, so that whole tiles can be copied by hardware. Where the items of a step
are too few to occupy the GPU, the KV of each is split among several programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.layers.attention.kv_splits import MAX_ROUNDS, MAX_SPLITS, choose_splits
from sglang.srt.layers.attention.triton_ops.gather_kernel import PLACE_SIZE, gather_kv
from sglang.srt.layers.attention.triton_ops.items import pack_rows
from sglang.srt.layers.attention.triton_ops.kernels import Paged, Tiles, workspace_size
from sglang.srt.layers.attention.triton_ops.prompt_kernel import (
    BLOCK_N,
    DTYPES,
    HEAD_DIMS,
    PACKED_ROWS,
    PROMPT_ITEM_SIZE,
    TensorDescriptor,
    attend_prompts,
    describe_gathered,
    rows_per_item,
)
from sglang.srt.layers.attention.triton_ops.sums_kernel import add_up_splits
from sglang.srt.layers.forward_batch import MIXED, GraphKey
from sglang.srt.layers.triton_launch import INTERPRETED
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.platform import has_warp_group_mma

# Fewer rows, or rows that see less, gain less by the faster kernel than gathering KV costs.
MIN_ROWS, MIN_KV_LEN = 128, 512
# Graphs launch these kernels anyway, and they are faster for all prompt rows that see at least
# this.
LONG_KV_LEN = 2048
MAX_GATHERED_BYTES = 1 << 30  # of a layer's K and V; requests beyond are attended where they lie
GRAPH_POSITIONS = 1024  # a graph's programs suit this length, and gather KV of any length
# Graphs of more rows split nothing: the launch that adds up would nearly always be useless.
MAX_SPLIT_GRAPH_ROWS = 512
NO_REQUEST = -1
_TILES = Tiles(block_m=PACKED_ROWS, block_n=BLOCK_N, num_warps=4, num_stages=1)  # of all items


class Prompt(NamedTuple):
    """A request that feeds many rows.

    Attributes:
        request: its index in the step.
        first_token: the first of its rows among the T of the step.
        q_len: its rows.
        kv_len: tokens with KV after the step, at most.
    """

    request: int
    first_token: int
    q_len: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class PromptItems:
    """The inputs of the kernels for a step.

    Attributes:
        items: [I, 5] int32, see `prompt_kernel.py`; empty ones have no rows.
        places: [P, 3] int32, see `gather_kv`.
        num_splits: [1] int32.
        num_positions: of the longest request, about.
        num_shares: items times splits, at most.
        may_be_split: the results of splits may have to be added up.
    """

    items: torch.Tensor
    places: torch.Tensor
    num_splits: torch.Tensor
    num_positions: int
    num_shares: int
    may_be_split: bool


@dataclass(slots=True)
class _GraphItems:
    """The items that a graph reads, their memory, and the values written last."""

    room: PromptItems
    memory: torch.Tensor
    numbers: list[int]


class PromptAttention:
    """Attends prompts.

    Args:
        kv_pool: of the model.
        num_heads: query heads.
        max_kv_len: tokens with KV of a request, at most.
        num_multiprocessors: of the GPU; each runs one program of the kernel at a time.
    """

    def __init__(
        self,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        max_kv_len: int,
        num_multiprocessors: int,
    ) -> None:
        kv = kv_pool.kv[0]
        self._kv_pool = kv_pool
        self._num_kv_heads = kv.shape[1] // 2
        self._num_multiprocessors = num_multiprocessors
        # Filled with NaN, so that reading a place that no split has written shows.
        size = workspace_size(MAX_ROUNDS * num_multiprocessors, PACKED_ROWS, kv.shape[2])
        self._workspace = torch.full((size,), float("nan"), device=kv.device)
        self._rows_per_item = rows_per_item(2 * num_heads // kv.shape[1])
        capacity = min(_align(max_kv_len), MAX_GATHERED_BYTES // kv[0].nbytes // BLOCK_N * BLOCK_N)
        self._gathered = kv.new_empty((capacity, *kv.shape[1:]))
        self._descriptor = describe_gathered(self._gathered)
        self._graphs: dict[GraphKey, _GraphItems] = {}
        self._step: PromptItems | None = None

    @staticmethod
    def can_serve(kv: torch.Tensor, num_heads: int) -> bool:
        """Tells whether this class can be used with the GPU and the heads of a layer's pool."""
        return (
            not INTERPRETED
            and has_warp_group_mma(kv.device)
            and kv.dtype in DTYPES
            and kv.shape[2] in HEAD_DIMS
            and rows_per_item(2 * num_heads // kv.shape[1]) > 0
        )

    def plan(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> frozenset[int]:
        """Prepares a step that replays no graph; returns the requests that this class attends.

        Args:
            q_lens, kv_lens: rows that each request feeds, and its tokens with KV after the step, at
                most. In a packed batch the first requests feed exactly that many, and the others
                fewer than MIN_ROWS: so the host knows where the rows of prompts lie.
        """
        taken, starts = choose(prompts_of(q_lens, kv_lens), self._gathered.shape[0])
        self._step = None
        if taken:
            items = make_items(taken, starts, self._rows_per_item)
            num_splits = self._splits_of(taken)
            numbers = items + make_places(taken, starts) + [num_splits]
            on_device = to_device(numbers, self._gathered.device, torch.int32)
            longest = max(prompt.kv_len for prompt in taken)
            num_shares = len(items) // PROMPT_ITEM_SIZE * num_splits
            self._step = _parts(on_device, len(items), longest, num_shares, num_splits > 1)
        return frozenset(prompt.request for prompt in taken)

    def plan_graph(
        self, key: GraphKey, q_lens: Sequence[int], kv_lens: Sequence[int]
    ) -> frozenset[int]:
        """Does the same before each capture and replay of a graph."""
        most_prompts = key.num_tokens // MIN_ROWS if key.tag == MIXED else 0
        self._step = None
        if most_prompts == 0:
            return frozenset()
        most_items = key.num_tokens // self._rows_per_item + most_prompts
        num_items = most_items * PROMPT_ITEM_SIZE
        may_be_split = key.num_tokens <= MAX_SPLIT_GRAPH_ROWS
        if key not in self._graphs:
            numbers = [0] * num_items + [NO_REQUEST, 0, 0] * most_prompts + [1]
            memory = to_device(numbers, self._gathered.device, torch.int32)
            num_shares = self._most_shares(most_items) if may_be_split else most_items
            room = _parts(memory, num_items, GRAPH_POSITIONS, num_shares, may_be_split)
            self._graphs[key] = _GraphItems(room, memory, numbers)
        held = self._graphs[key]
        prompts = prompts_of(q_lens, kv_lens, key.width + 1)
        taken, starts = choose(prompts, self._gathered.shape[0], most_prompts)
        items = make_items(taken, starts, self._rows_per_item)
        places = make_places(taken, starts)
        numbers = items + [0] * (num_items - len(items))
        numbers += places + [NO_REQUEST, 0, 0] * (most_prompts - len(taken))
        numbers.append(self._splits_of(taken) if may_be_split else 1)
        if numbers != held.numbers:
            overwrite(held.memory, numbers)
            held.numbers = numbers
        self._step = held.room
        return frozenset(prompt.request for prompt in taken)

    def forward(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, paged: Paged, window: int | None
    ) -> None:
        """Attends the prompts that were planned, if any.

        Args:
            q: [T, num_heads, head_dim].
            out: [T, num_heads * head_dim]; their rows are written.
        """
        if (step := self._step) is None:
            return
        kv = self._kv_pool.kv[layer]
        gather_kv(kv, self._gathered, step.places, paged, step.num_positions, BLOCK_N)
        self.attend(q, kv, self._descriptor, out, paged, window)

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        gathered: TensorDescriptor,
        out: torch.Tensor,
        paged: Paged,
        window: int | None,
    ) -> None:
        """Attends, once K and V of a layer are gathered."""
        step = self._step
        assert step is not None
        shares = step.num_splits, self._workspace
        attend_prompts(q, gathered, out, step.items, paged, window, *shares, step.num_shares)
        if step.may_be_split:
            paged = replace(paged, ancestors=None)  # prompts have no trees
            sums = _TILES, MAX_SPLITS, self._workspace
            add_up_splits(
                q, kv, out, step.items, paged, window, *sums, device_splits=step.num_splits
            )  # fmt: skip

    def _splits_of(self, taken: Sequence[Prompt]) -> int:
        tiles = tiles_of_items(taken, self._rows_per_item)
        return choose_splits(tiles, self._num_kv_heads, self._num_multiprocessors)

    def _most_shares(self, num_items: int) -> int:
        """Returns the most items times splits of any step of up to `num_items` items."""
        return max(num_items, MAX_ROUNDS * self._num_multiprocessors // self._num_kv_heads)


def prompts_of(
    q_lens: Sequence[int], kv_lens: Sequence[int], least_rows: int = MIN_ROWS
) -> list[Prompt]:
    """Lists the requests of a step that feed enough rows over enough KV: MIN_ROWS, or over
    LONG_KV_LEN tokens `least_rows`."""
    starts = accumulate(q_lens, initial=0)
    prompts = map(Prompt, range(len(q_lens)), starts, q_lens, kv_lens)
    return [
        each
        for each in prompts
        if (each.q_len >= MIN_ROWS and each.kv_len >= MIN_KV_LEN)
        or (each.q_len >= least_rows and each.kv_len >= LONG_KV_LEN)
    ]


def choose(
    prompts: Sequence[Prompt], capacity: int, most: int | None = None
) -> tuple[list[Prompt], list[int]]:
    """Chooses the prompts that are gathered, at most `most`, those that feed most rows first, while
    there is room for their KV. Returns them with the row of each one's first position. `capacity`
    is in tokens, a multiple of BLOCK_N."""
    taken, starts = list[Prompt](), list[int]()
    end = 0
    for prompt in sorted(prompts, key=lambda prompt: -prompt.q_len):
        size = _align(prompt.kv_len)
        if end + size <= capacity and (most is None or len(taken) < most):
            taken.append(prompt)
            starts.append(end)
            end += size
    return taken, starts


def make_items(prompts: Sequence[Prompt], starts: Sequence[int], rows_per_item: int) -> list[int]:
    """Makes the items of `prompt_kernel.py`. Those that see most KV come first, and short ones run
    last, so that multiprocessors end together."""
    items = list[tuple[int, tuple[int, ...]]]()
    for prompt, start in zip(prompts, starts, strict=True):
        for first in range(0, prompt.q_len, rows_per_item):
            num_rows, to_end = min(rows_per_item, prompt.q_len - first), prompt.q_len - first
            rows, token = pack_rows(num_rows, first), prompt.first_token + first
            numbers = (prompt.request, token, rows, to_end, start)
            items.append((prompt.kv_len - to_end, numbers))
    items.sort(key=lambda item: -item[0])
    return [number for _, numbers in items for number in numbers]


def make_places(prompts: Sequence[Prompt], starts: Sequence[int]) -> list[int]:
    """Makes the places of `gather_kv`."""
    places = list[int]()
    for prompt, start in zip(prompts, starts, strict=True):
        places += (prompt.request, start, _align(prompt.kv_len))
    return places


def tiles_of_items(prompts: Sequence[Prompt], rows_per_item: int) -> list[int]:
    """Returns the tiles of KV that each item sees, without regard to sliding windows."""
    return [
        _align(prompt.kv_len - prompt.q_len + min(first + rows_per_item, prompt.q_len)) // BLOCK_N
        for prompt in prompts
        for first in range(0, prompt.q_len, rows_per_item)
    ]


def _parts(
    numbers: torch.Tensor, size: int, num_positions: int, num_shares: int, may_be_split: bool
) -> PromptItems:
    """Splits a tensor into the items (`size` numbers), the places and the splits."""
    return PromptItems(
        items=numbers[:size].view(-1, PROMPT_ITEM_SIZE),
        places=numbers[size:-1].view(-1, PLACE_SIZE),
        num_splits=numbers[-1:],
        num_positions=num_positions,
        num_shares=num_shares,
        may_be_split=may_be_split,
    )


def _align(num_positions: int) -> int:
    return -(-num_positions // BLOCK_N) * BLOCK_N
