"""Tests which requests of a step are gathered and how their rows are cut: every row once, room for
all, the longest work first. The kernels run on a GPU (test/gpu/test_attention_kernels.py)."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("needs Triton", allow_module_level=True)

from sglang.srt.layers.attention.prompt_attention import (
    LONG_KV_LEN,
    MAX_SPLIT_GRAPH_ROWS,
    MIN_KV_LEN,
    MIN_ROWS,
    NO_REQUEST,
    Prompt,
    PromptAttention,
    choose,
    make_items,
    prompts_of,
)
from sglang.srt.layers.attention.triton_ops.prompt_kernel import (
    BLOCK_N,
    PACKED_ROWS,
    PROMPT_ITEM_SIZE,
    rows_per_item,
)
from sglang.srt.layers.forward_batch import DECODE, MIXED, GraphKey

SEEDS = range(40)


def random_step(source: random.Random) -> tuple[list[int], list[int]]:
    """Rows and KV of requests of any lengths, around the limits too."""
    q_lens, kv_lens = list[int](), list[int]()
    for _ in range(source.randint(1, 9)):
        q_len = source.choice([1, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, source.randint(1, 2000)])
        before = source.choice([0, 1, BLOCK_N - 1, BLOCK_N, source.randint(0, 3000)])
        q_lens.append(q_len)
        kv_lens.append(before + q_len)
    return q_lens, kv_lens


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_are_the_requests_of_many_rows(seed: int) -> None:
    q_lens, kv_lens = random_step(random.Random(seed))
    expected = [
        (request, sum(q_lens[:request]), q_len, kv_lens[request])
        for request, q_len in enumerate(q_lens)
        if q_len >= MIN_ROWS and kv_lens[request] >= MIN_KV_LEN
    ]
    assert prompts_of(q_lens, kv_lens) == expected


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_requests_have_room_of_their_own_within_the_capacity(seed: int) -> None:
    source = random.Random(seed)
    prompts = prompts_of(*random_step(source))
    capacity = source.randint(0, 60) * BLOCK_N
    taken, starts = choose(prompts, capacity)
    assert set(taken) <= set(prompts)
    owners: set[int] = set()
    for prompt, start in zip(taken, starts, strict=True):
        assert start % BLOCK_N == 0
        room = set(range(start // BLOCK_N, -(-(start + prompt.kv_len) // BLOCK_N)))
        assert not room & owners
        owners |= room
    assert not owners or max(owners) < capacity // BLOCK_N
    assert sorted(choose(prompts, 1 << 20)[0]) == prompts


def test_without_room_for_all_those_that_feed_most_are_gathered() -> None:
    prompts = [Prompt(0, 0, 300, 300), Prompt(1, 300, 900, 900), Prompt(2, 1200, 400, 400)]
    taken, _ = choose(prompts, 12 * BLOCK_N)
    assert [prompt.q_len for prompt in taken] == [900, 400]


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_items_cover_each_row_once_and_those_of_most_kv_come_first(seed: int) -> None:
    group = (1, 3, 4, 7, 64)[seed % 5]
    taken, starts = choose(prompts_of(*random_step(random.Random(seed))), 1 << 20)
    most = rows_per_item(group)
    numbers = make_items(taken, starts, most)
    expected = {
        (prompt.request, prompt.first_token + row, prompt.kv_len - prompt.q_len + row, start)
        for prompt, start in zip(taken, starts, strict=True)
        for row in range(prompt.q_len)
    }
    found, ends = list[tuple[int, int, int, int]](), list[int]()
    for place in range(0, len(numbers), PROMPT_ITEM_SIZE):
        request, first, packed, to_end, start = numbers[place : place + PROMPT_ITEM_SIZE]
        num_rows = packed & 255
        assert packed >> 8 == first - next(
            each.first_token for each in taken if each.request == request
        )
        kv_len = next(prompt.kv_len for prompt in taken if prompt.request == request)
        assert 1 <= num_rows <= most
        found += [(request, first + row, kv_len - to_end + row, start) for row in range(num_rows)]
        ends.append(kv_len - to_end)
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert ends == sorted(ends, reverse=True)


class SmallPool:
    """All that planning looks at."""

    kv = (torch.zeros(8, 4, 64, dtype=torch.bfloat16),)  # a layer's


def rows_and_places(planned: Any) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Returns what the kernels would find: items that have rows, places that have a request."""
    items = {tuple(item) for item in planned.items.tolist() if item[2] > 0}
    return items, {tuple(place) for place in planned.places.tolist() if place[0] != NO_REQUEST}


@pytest.mark.parametrize("max_kv_len", [700, 3000])
def test_a_replayed_graph_reads_the_items_of_its_own_step(max_kv_len: int) -> None:
    """Whatever step was planned for it before, and at the same address; as if without a graph."""
    source = random.Random(max_kv_len)
    kept, fresh = (PromptAttention(SmallPool, 8, max_kv_len, 132) for _ in range(2))  # type: ignore[arg-type]
    keys = [GraphKey(MIXED, 8, 4, 640), GraphKey(MIXED, 8, 4, 1024), GraphKey(MIXED, 64, 4, 1024)]
    addresses: dict[GraphKey, int] = {}
    num_taken, q_lens = 0, [1]
    for _ in range(200):
        key = source.choice(keys)
        if source.random() < 0.6:  # else the same rows of requests with other KV
            q_lens, left = [], key.num_tokens
            while left > 0 and len(q_lens) < 8:
                q_lens.append(min(left, source.choice([1, 4, 100, MIN_ROWS, 300, 900])))
                left -= q_lens[-1]
        if sum(q_lens) > key.num_tokens:
            continue
        kv_lens = [min(q_len + source.choice([0, 1, 90, 1900]), max_kv_len) for q_len in q_lens]
        taken = kept.plan_graph(key, q_lens, kv_lens)
        assert taken == fresh.plan(q_lens, kv_lens)
        assert kept._step is not None
        expected = (set(), set()) if fresh._step is None else rows_and_places(fresh._step)
        assert rows_and_places(kept._step) == expected
        assert addresses.setdefault(key, kept._step.items.data_ptr()) == kept._step.items.data_ptr()
        num_taken += len(taken)
    assert num_taken > 100


def test_a_graph_without_prompts_has_nothing_of_the_step_before() -> None:
    attention = PromptAttention(SmallPool, 8, 3000, 132)  # type: ignore[arg-type]
    for key in (GraphKey(DECODE, 4, 1, 4), GraphKey(MIXED, 4, 1, MIN_ROWS - 1)):
        assert attention.plan([1, 300], [9, 900]) == {1}
        assert attention.plan_graph(key, [1, 1, 1], [7, 8, 9]) == frozenset()
        assert attention._step is None


def test_a_request_whose_kv_has_no_room_is_left_to_others() -> None:
    attention = PromptAttention(SmallPool, 8, 600, 132)  # type: ignore[arg-type]
    assert attention.plan([300, 400], [600, 600]) == {1}
    attention._gathered = attention._gathered[:BLOCK_N]
    assert attention.plan([300, 400], [600, 600]) == frozenset()
    assert attention._step is None


def test_a_graph_takes_prompts_of_fewer_rows_where_they_see_much() -> None:
    """But no look-ahead, which feeds as many rows as the graph is wide, and only those that it has
    room for."""
    attention = PromptAttention(SmallPool, 8, 1 << 15, 132)  # type: ignore[arg-type]
    key = GraphKey(MIXED, 8, 16, 2 * MIN_ROWS)
    kv_lens = [9000, 9000, 9000, LONG_KV_LEN - 1, 9000]
    assert attention.plan_graph(key, [17, 90, 16, 100, 30], kv_lens) == {1, 4}


@pytest.mark.parametrize("num_tokens", [256, 512, 1024])
def test_a_graph_has_room_for_all_splits_of_its_steps(num_tokens: int) -> None:
    """Programs and memory; graphs of many rows split nothing."""
    source = random.Random(num_tokens)
    attention = PromptAttention(SmallPool, 8, 1 << 15, 132)  # type: ignore[arg-type]
    key, found = GraphKey(MIXED, 8, 1, num_tokens), set()
    for _ in range(100):
        q_len = source.randint(2, num_tokens)
        attention.plan_graph(key, [q_len], [source.randint(q_len, 30000)])
        step = attention._step
        assert step is not None
        num_splits = int(step.num_splits)
        num_items = int((step.items[:, 2] > 0).sum())
        assert num_items * num_splits <= step.num_shares
        if num_splits > 1:
            assert step.may_be_split
            packed_rows = num_items * num_splits * 2 * PACKED_ROWS  # of two KV heads
            assert packed_rows * (64 + 2) <= attention._workspace.numel()
        found.add(num_splits)
    assert found == {1} if num_tokens > MAX_SPLIT_GRAPH_ROWS else len(found) > 2
