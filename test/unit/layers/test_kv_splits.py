"""Splits of the KV of few rows, against a schedule that is simulated program by program."""

from __future__ import annotations

import heapq
import random

import pytest

from sglang.srt.layers.attention.kv_splits import (
    MAX_ROUNDS,
    MAX_SPLITS,
    PROGRAM_TILES,
    SUM_TILES,
    SUM_TILES_OF_A_PROGRAM,
    choose_splits,
)

H100, KV_HEADS, TILE = 132, 8, 128
ROWS_OF_AN_ITEM = 32  # of four query heads that share a KV head


def tiles_of(num_rows: int, kv_len: int) -> list[int]:
    """Tiles that each item of a prompt's last rows sees."""
    ends = range(kv_len, kv_len - num_rows, -ROWS_OF_AN_ITEM)
    return [-(-end // TILE) for end in ends]


def simulated(tiles: list[int], num_kv_heads: int, num_multiprocessors: int, splits: int) -> float:
    """Returns when the last program ends: each starts on the multiprocessor that is free first."""
    free = [0.0] * num_multiprocessors
    for seen in sorted(tiles, reverse=True):
        share = -(-seen // splits)
        for first in range(0, seen, share):
            for _ in range(num_kv_heads):
                heapq.heapreplace(free, free[0] + min(share, seen - first) + PROGRAM_TILES)
    sums = SUM_TILES + SUM_TILES_OF_A_PROGRAM * len(tiles) * num_kv_heads * splits
    return max(free) + (sums if splits > 1 else 0)


@pytest.mark.long_matrix
@pytest.mark.parametrize("num_rows", [32, 100, 128, 160, 256, 384, 512, 640, 1024, 2048])
@pytest.mark.parametrize("kv_len", [2048, 8192, 16384, 30000])
@pytest.mark.parametrize("num_multiprocessors", [H100, 78])
def test_no_other_number_of_splits_ends_much_earlier(
    num_rows: int, kv_len: int, num_multiprocessors: int
) -> None:
    tiles = tiles_of(num_rows, kv_len)
    chosen = choose_splits(tiles, KV_HEADS, num_multiprocessors)
    most = max(1, MAX_ROUNDS * num_multiprocessors // (len(tiles) * KV_HEADS))
    times = [
        simulated(tiles, KV_HEADS, num_multiprocessors, splits)
        for splits in range(1, min(most, MAX_SPLITS) + 1)
    ]
    assert times[chosen - 1] <= 1.1 * min(times)


def test_128_rows_over_30_000_tokens_take_a_third_of_512() -> None:
    few, many = tiles_of(128, 30000), tiles_of(512, 30000)
    assert choose_splits(many, KV_HEADS, H100) == 1
    few_time = simulated(few, KV_HEADS, H100, choose_splits(few, KV_HEADS, H100))
    assert few_time <= simulated(many, KV_HEADS, H100, 1) / 3


@pytest.mark.parametrize("seed", range(20))
def test_several_prompts_are_hardly_slower_than_unsplit_and_have_room(seed: int) -> None:
    source = random.Random(seed)
    tiles = [
        seen
        for _ in range(source.randint(1, 5))
        for seen in tiles_of(source.randint(17, 600), source.randint(600, 32768))
    ]
    chosen = choose_splits(tiles, KV_HEADS, H100)
    assert chosen == 1 or len(tiles) * KV_HEADS * chosen <= MAX_ROUNDS * H100
    unsplit = simulated(tiles, KV_HEADS, H100, 1)
    assert simulated(tiles, KV_HEADS, H100, chosen) <= 1.1 * unsplit


def test_a_step_without_items_has_one_split() -> None:
    assert choose_splits([], KV_HEADS, H100) == 1
