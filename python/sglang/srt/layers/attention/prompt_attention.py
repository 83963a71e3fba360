"""Attention of the requests of a step that feed many rows, on Hopper GPUs: their K and V are
gathered once per layer, so that whole tiles can be copied by hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.layers.attention.triton_ops.gather_kernel import PLACE_SIZE, gather_kv
from sglang.srt.layers.attention.triton_ops.kernels import Paged
from sglang.srt.layers.attention.triton_ops.prompt_kernel import (
    BLOCK_N,
    DTYPES,
    HEAD_DIMS,
    PROMPT_ITEM_SIZE,
    attend_prompts,
    describe_gathered,
    rows_per_item,
)
from sglang.srt.layers.forward_batch import MIXED, GraphKey
from sglang.srt.layers.triton_launch import INTERPRETED
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.platform import has_warp_group_mma

# Fewer rows, or rows that see less, gain less by the faster kernel than gathering KV costs.
MIN_ROWS, MIN_KV_LEN = 128, 512
MAX_GATHERED_BYTES = 1 << 30  # of a layer's K and V; requests beyond are attended where they lie
GRAPH_POSITIONS = 1024  # whose programs gather the KV of a request in a graph, whatever its length
NO_REQUEST = -1


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
    """What the kernels read of a step.

    Attributes:
        items: [I, 5] int32, see `prompt_kernel.py`; empty ones have no rows.
        places: [P, 3] int32, see `gather_kv`.
        num_positions: of the longest request, about.
    """

    items: torch.Tensor
    places: torch.Tensor
    num_positions: int


@dataclass(slots=True)
class _GraphItems:
    """The items that a graph reads, and the memory that holds them with what was written last."""

    room: PromptItems
    memory: torch.Tensor
    numbers: list[int]


class PromptAttention:
    """Attends prompts.

    Args:
        kv_pool: of the model.
        num_heads: query heads.
        max_kv_len: tokens with KV of a request, at most.
    """

    def __init__(self, kv_pool: MHATokenToKVPool, num_heads: int, max_kv_len: int) -> None:
        kv = kv_pool.kv[0]
        self._kv_pool = kv_pool
        self._rows_per_item = rows_per_item(2 * num_heads // kv.shape[1])
        capacity = min(_align(max_kv_len), MAX_GATHERED_BYTES // kv[0].nbytes // BLOCK_N * BLOCK_N)
        self._gathered = kv.new_empty((capacity, *kv.shape[1:]))
        self._descriptor = describe_gathered(self._gathered)
        self._graphs: dict[GraphKey, _GraphItems] = {}
        self._step: PromptItems | None = None

    @staticmethod
    def can_serve(kv: torch.Tensor, num_heads: int) -> bool:
        """Whether the GPU and the heads of a layer's pool are such that this class can be used."""
        return (
            not INTERPRETED
            and has_warp_group_mma(kv.device)
            and kv.dtype in DTYPES
            and kv.shape[2] in HEAD_DIMS
            and rows_per_item(2 * num_heads // kv.shape[1]) > 0
        )

    def plan(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> frozenset[int]:
        """Once per step that replays no graph; returns the requests that it takes.

        Args:
            q_lens, kv_lens: rows that each request feeds, and its tokens with KV after the step, at
                most. In a packed batch the first requests feed exactly so many, and none of the
                others as many as MIN_ROWS: so the host knows where the rows of prompts lie.
        """
        taken, starts = choose(prompts_of(q_lens, kv_lens), self._gathered.shape[0])
        self._step = None
        if taken:
            items = make_items(taken, starts, self._rows_per_item)
            places = make_places(taken, starts)
            both = to_device(items + places, self._gathered.device, torch.int32)
            longest = max(prompt.kv_len for prompt in taken)
            self._step = _split(both, len(items), longest)
        return frozenset(prompt.request for prompt in taken)

    def plan_graph(
        self, key: GraphKey, q_lens: Sequence[int], kv_lens: Sequence[int]
    ) -> frozenset[int]:
        """As `plan`, before each capture and replay of a graph."""
        most_prompts = key.num_tokens // MIN_ROWS if key.tag == MIXED else 0
        self._step = None
        if most_prompts == 0:
            return frozenset()
        num_items = (key.num_tokens // self._rows_per_item + most_prompts) * PROMPT_ITEM_SIZE
        if key not in self._graphs:
            numbers = [0] * num_items + [NO_REQUEST, 0, 0] * most_prompts
            both = to_device(numbers, self._gathered.device, torch.int32)
            self._graphs[key] = _GraphItems(_split(both, num_items, GRAPH_POSITIONS), both, numbers)
        held = self._graphs[key]
        taken, starts = choose(prompts_of(q_lens, kv_lens), self._gathered.shape[0])
        items = make_items(taken, starts, self._rows_per_item)
        places = make_places(taken, starts)
        numbers = items + [0] * (num_items - len(items))
        numbers += places + [NO_REQUEST, 0, 0] * (most_prompts - len(taken))
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
        attend_prompts(q, self._descriptor, out, step.items, paged, window)


def prompts_of(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Prompt]:
    """Of a step, the requests that feed enough rows over enough KV."""
    starts = accumulate(q_lens, initial=0)
    prompts = map(Prompt, range(len(q_lens)), starts, q_lens, kv_lens)
    return [each for each in prompts if each.q_len >= MIN_ROWS and each.kv_len >= MIN_KV_LEN]


def choose(prompts: Sequence[Prompt], capacity: int) -> tuple[list[Prompt], list[int]]:
    """Prompts that are gathered, those that feed most first, as long as there is room for their KV,
    and the row of each one's first position. `capacity` is in tokens, a multiple of BLOCK_N."""
    taken, starts = list[Prompt](), list[int]()
    end = 0
    for prompt in sorted(prompts, key=lambda prompt: -prompt.q_len):
        size = _align(prompt.kv_len)
        if end + size <= capacity:
            taken.append(prompt)
            starts.append(end)
            end += size
    return taken, starts


def make_items(prompts: Sequence[Prompt], starts: Sequence[int], rows_per_item: int) -> list[int]:
    """The items of `prompt_kernel.py`. Those that see most KV come first: the last ones to run are
    short, so that multiprocessors end together."""
    items = list[tuple[int, tuple[int, ...]]]()
    for prompt, start in zip(prompts, starts, strict=True):
        for first in range(0, prompt.q_len, rows_per_item):
            num_rows, to_end = min(rows_per_item, prompt.q_len - first), prompt.q_len - first
            numbers = (prompt.request, prompt.first_token + first, num_rows, to_end, start)
            items.append((prompt.kv_len - to_end, numbers))
    items.sort(key=lambda item: -item[0])
    return [number for _, numbers in items for number in numbers]


def make_places(prompts: Sequence[Prompt], starts: Sequence[int]) -> list[int]:
    """The places of `gather_kv`."""
    places = list[int]()
    for prompt, start in zip(prompts, starts, strict=True):
        places += (prompt.request, start, _align(prompt.kv_len))
    return places


def _split(numbers: torch.Tensor, num_items: int, num_positions: int) -> PromptItems:
    """Of one tensor that holds the items, `num_items` numbers, then the places."""
    items = numbers[:num_items].view(-1, PROMPT_ITEM_SIZE)
    return PromptItems(items, numbers[num_items:].view(-1, PLACE_SIZE), num_positions)


def _align(num_positions: int) -> int:
    return -(-num_positions // BLOCK_N) * BLOCK_N
