"""Decode attention over prefixes that requests share: its kernels in Triton's interpreter, and how
the host cuts prefixes into tiles."""

from __future__ import annotations

import random

import pytest
import torch

from attention_cases import TOLERANCE
from interpreted import run_interpreted
from sglang.srt.layers.attention.shared_prefixes import TilePlan
from sglang.srt.mem_cache.memory_pool import SharedPrefix
from shared_prefix_cases import SHARED_CASES


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/shared_prefix_cases.py", "triton", request)


@pytest.mark.parametrize("name", SHARED_CASES)
def test_each_row_sees_the_keys_of_its_slots(errors: dict[str, float | str], name: str) -> None:
    error = errors[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_each_request_of_the_prefixes_for_which_there_is_room_once(seed: int) -> None:
    chooser = random.Random(seed)
    num_rows, tile_requests, max_tiles = 300, chooser.choice([1, 4, 16]), chooser.choice([1, 8, 64])
    rows = chooser.sample(range(num_rows), 200)
    places = chooser.sample(range(200), 200)
    prefixes = []
    while len(places) > 50:
        found = tuple(places.pop() for _ in range(chooser.randint(2, 40)))
        own = tuple(rows[place] for place in found)
        prefixes.append(SharedPrefix(chooser.randint(1, 5000), found, own))
    plan = TilePlan.of(prefixes, tile_requests, max_tiles, num_rows)
    assert len(plan.tiles) <= max_tiles
    sizes = [-(-len(each.requests) // tile_requests) for each in prefixes]
    assert len(plan.tiles) == max_tiles or sum(sizes) == len(plan.tiles) or min(sizes) > 1
    in_tiles: dict[int, int] = {}  # row to tokens of its prefix
    for tile, (first, count, num_tokens) in enumerate(plan.tiles):
        assert 1 <= count <= tile_requests
        for place, request in enumerate(plan.members[first : first + count]):
            row = rows[request]
            assert row not in in_tiles
            in_tiles[row] = num_tokens
            assert plan.places[row] == tile * tile_requests + place
            [prefix] = [each for each in prefixes if request in each.requests]
            assert prefix.num_tokens == num_tokens
            assert all(rows[each] in in_tiles or each in plan.members for each in prefix.requests)
    assert plan.starts == [in_tiles.get(row, 0) for row in range(num_rows)]
    assert [place >= 0 for place in plan.places] == [row in in_tiles for row in range(num_rows)]
