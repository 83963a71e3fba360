"""Which graph a step replays: one with room for it, and none that wastes more than needed."""

from __future__ import annotations

import random

import pytest

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.model_executor.cuda_graph_runner import MAX_WIDE_TOKENS, GraphKeys

SUPPORTS = (GraphSupport.UNIFORM_Q, GraphSupport.RAGGED_Q)


def test_no_graphs_where_the_backend_has_none() -> None:
    assert GraphKeys(GraphSupport.NEVER, 8, 15).all == []


@pytest.mark.parametrize("support", SUPPORTS)
def test_width_1_gives_graphs_of_plain_decoding_alone(support: GraphSupport) -> None:
    keys = GraphKeys(support, 20, 1)
    assert [key.num_reqs for key in keys.all] == [1, 2, 4, 8, 16, 20]
    assert all(key.width == 1 and key.num_tokens == key.num_reqs for key in keys.all)
    assert keys.find([2]) is None


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("max_requests", [1, 3, 8, 100, 128])
def test_a_step_finds_the_tightest_graph(support: GraphSupport, max_requests: int) -> None:
    keys = GraphKeys(support, max_requests, 15)
    assert len(set(keys.all)) == len(keys.all)
    chooser = random.Random(max_requests)
    for _ in range(300):
        num_reqs = chooser.randint(1, max_requests)
        shape = [chooser.randint(1, chooser.choice([1, 3, 15])) for _ in range(num_reqs)]
        found = keys.find(shape)
        fits = [
            key
            for key in keys.all
            if key.num_reqs >= num_reqs
            and key.width >= max(shape)
            and key.num_tokens >= sum(shape)
            and (max(shape) > 1 or key.tag == "decode")
        ]
        if found is None:
            assert not fits
            continue
        assert found in fits
        assert found.num_reqs == min(key.num_reqs for key in fits)
        same = [key for key in fits if key.num_reqs == found.num_reqs]
        assert found.num_tokens == min(key.num_tokens for key in same)


@pytest.mark.parametrize("max_requests", [1, 8, 128])
def test_every_uniform_step_of_moderate_size_has_a_ragged_graph(max_requests: int) -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, max_requests, 15)
    for num_reqs in range(1, max_requests + 1):
        for width in range(1, 16):
            key = keys.find([width] * num_reqs)
            if num_reqs * width * 2 <= MAX_WIDE_TOKENS:
                assert key is not None, (num_reqs, width)
            if key is not None and width > 1:
                assert key.num_tokens <= max(2.0 * num_reqs * width, num_reqs * width + 8)


def test_uniform_graphs_have_the_same_rows_for_each_request() -> None:
    keys = GraphKeys(GraphSupport.UNIFORM_Q, 128, 15)
    assert all(key.is_uniform for key in keys.all)
    assert {key.width for key in keys.all} == {1, 3, 7, 15}
