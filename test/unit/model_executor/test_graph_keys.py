"""Tests which graph a step replays: one with room for it, and none that wastes more than needed."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import SharedPrefix
from sglang.srt.model_executor import graph_keys
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.graph_keys import LEAST_SAVING, MAX_WIDE_TOKENS, GraphKeys
from sglang.srt.processes.runtime_config import MAX_GRAPH_ROWS
from sglang.srt.step.torch_step_ops import TorchStepOps

SUPPORTS = (GraphSupport.UNIFORM_Q, GraphSupport.RAGGED_Q)


def test_no_graphs_where_the_backend_has_none() -> None:
    assert GraphKeys(GraphSupport.NEVER, 8, 15).all == []


def test_what_is_kept_of_shapes_is_bounded_and_no_answer_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts come in any number of tokens, so steps in ever new shapes."""
    monkeypatch.setattr(graph_keys, "MAX_KNOWN", 50)
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, 3, 256)

    def answers() -> list[object]:
        return [
            keys.find_shape(num_reqs, widest, num_reqs + widest)
            for num_reqs in range(1, 9)
            for widest in range(1, 300)
        ]

    tracemalloc.start()
    first = answers()
    kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*graph_keys.py")])
    tracemalloc.stop()
    num_bytes = sum(trace.size for trace in kept.traces)
    assert num_bytes < 50 * 1000
    assert answers() == first
    assert len(set(first)) > 10


@pytest.mark.parametrize("support", SUPPORTS)
def test_width_1_gives_graphs_of_plain_decoding_alone(support: GraphSupport) -> None:
    keys = GraphKeys(support, 20, 1)
    assert [key.num_reqs for key in keys.all] == [1, 2, 4, 8, 16, 20]
    assert all(key.width == 1 and key.num_tokens == key.num_reqs for key in keys.all)
    assert keys.find([2]) is None


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("max_mixed_rows", [0, 1024])
@pytest.mark.parametrize("max_requests", [1, 3, 8, 100, 128])
def test_a_step_finds_the_tightest_graph(
    support: GraphSupport, max_requests: int, max_mixed_rows: int
) -> None:
    keys = GraphKeys(support, max_requests, 15, max_mixed_rows)
    assert len(set(keys.all)) == len(keys.all)
    chooser = random.Random(max_requests)
    for _ in range(300):
        num_reqs = chooser.randint(1, max_requests)
        shape = [chooser.randint(1, chooser.choice([1, 3, 15, 300])) for _ in range(num_reqs)]
        found = keys.find(shape)
        has_room = [
            key for key in keys.all if key.num_reqs >= num_reqs and key.num_tokens >= sum(shape)
        ]
        fits = [
            key
            for key in has_room
            if key.tag != "mixed"
            and key.width >= max(shape)
            and (max(shape) > 1 or key.tag == "decode")
        ]
        if not fits and max(shape) > 1:
            fits = [key for key in has_room if key.tag == "mixed"]
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
                padding = key.num_tokens - num_reqs * width
                assert padding < max(32, min(64, num_reqs * width / 5))


def test_uniform_graphs_have_the_same_rows_for_each_request() -> None:
    keys = GraphKeys(GraphSupport.UNIFORM_Q, 128, 15)
    assert all(key.is_uniform for key in keys.all)
    assert {key.width for key in keys.all} == {1, 3, 7, 15}


@pytest.mark.parametrize("max_requests", [1, 8, 128])
def test_steps_with_prompts_waste_few_rows(max_requests: int) -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, max_requests, 1, MAX_GRAPH_ROWS)
    for prompt in range(2, MAX_GRAPH_ROWS + 1 - max_requests):
        key = keys.find([prompt] + [1] * (max_requests - 1))
        num_rows = prompt + max_requests - 1
        assert key is not None
        most = max(32, min(64, num_rows / 5)) if num_rows <= 1024 else 128
        assert key.num_tokens - num_rows < most
    assert keys.find([MAX_GRAPH_ROWS + 1]) is None
    few_of_many = GraphKeys(GraphSupport.RAGGED_Q, 2000, 1, MAX_GRAPH_ROWS).find([20] + [1] * 8)
    assert few_of_many is not None
    assert few_of_many.num_tokens <= 1024
    assert GraphKeys(GraphSupport.UNIFORM_Q, 8, 1, 1024).find([30, 1]) is None


@pytest.mark.long_matrix
@pytest.mark.parametrize("width", [1, 15])
@pytest.mark.parametrize("max_requests", [1, 3, 8, 9, 64, 100, 1000, 1024, 1500])
def test_every_step_of_up_to_the_most_rows_has_a_graph(max_requests: int, width: int) -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, max_requests, width, MAX_GRAPH_ROWS)
    chooser = random.Random(width)
    for _ in range(500):
        num_reqs = min(MAX_GRAPH_ROWS, chooser.choice([1, 9, max_requests, chooser.randint(1, 99)]))
        shape = [1] * min(num_reqs, max_requests)
        most = MAX_GRAPH_ROWS - len(shape)
        rest = min(most, chooser.choice([1, most, chooser.randrange(1, MAX_GRAPH_ROWS)]))
        while rest > 0:
            more = chooser.choice([rest, chooser.randint(1, rest), min(rest, width)])
            shape[chooser.randrange(len(shape))] += more
            rest -= more
        assert keys.find(shape) is not None, shape
    for num_reqs in range(1, max_requests + 1):
        assert keys.find([1] * num_reqs) is not None, num_reqs


@pytest.mark.parametrize("width", [1, 15])
def test_a_prompt_of_which_all_rows_are_wanted_has_a_graph_that_computes_them(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without look-ahead there is none: its graphs compute the last layer for the rows read."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    keys = GraphKeys(GraphSupport.RAGGED_Q, 64, width, MAX_GRAPH_ROWS)
    ops = TorchStepOps(torch.device("cpu"))
    runner = CudaGraphRunner(lambda _: None, lambda batch: (ids,), ops, keys, 2000, "cpu")
    for q_lens in ([1000], [30, 1, 1], [*[1] * 63, 900]):
        ids, rows = torch.zeros(sum(q_lens), dtype=torch.int64), torch.arange(len(q_lens))
        batch = ForwardBatch(ids, ids, ids, rows, q_lens, rows + 2000, [2000] * len(q_lens))
        found = runner.key_of(batch)
        assert (found is None) == (width == 1)
        for num_read in (0, 1, len(q_lens)):
            assert runner.key_of(replace(batch, read_index=rows[:num_read])) == keys.find(q_lens)


def test_a_step_with_masks_for_trees_replays_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    ids, rows = torch.zeros(4, dtype=torch.int64), torch.arange(2)
    keys = GraphKeys(GraphSupport.RAGGED_Q, 4, 15)
    ops = TorchStepOps(torch.device("cpu"))
    runner = CudaGraphRunner(lambda _: None, lambda batch: (ids,), ops, keys, 100, "cpu")
    batch = ForwardBatch(ids, ids, ids, rows, [3, 1], rows + 3, [3, 4])
    assert runner.key_of(batch) == keys.find([3, 1])
    assert runner.key_of(replace(batch, ancestors=ids - 1)) is None


def test_decodes_that_share_prefixes_replay_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    plain = GraphKeys(GraphSupport.RAGGED_Q, 100, 1, 1024)
    keys = GraphKeys(GraphSupport.RAGGED_Q, 100, 1, 1024, shares_kv=True)
    assert plain.all == [key for key in keys.all if not key.shares_kv]
    both = GraphKeys(GraphSupport.RAGGED_Q, 100, 1, 1024, shares_kv=True, has_both_orders=True)
    ops = TorchStepOps(torch.device("cpu"))
    for num_reqs, expected in ((2, 16), (16, 16), (17, 32), (97, 100)):
        ids = torch.zeros(num_reqs, dtype=torch.int64)
        step = ForwardBatch(ids, ids, ids, ids, [1] * num_reqs, ids + 9, [9] * num_reqs)
        shared = replace(step, shared_prefixes=[SharedPrefix(8, (0, 1), (3, 5))])
        for known in (plain, keys):
            runner = CudaGraphRunner(lambda _: None, lambda _: (None,), ops, known, 99, "cpu")
            assert runner.key_of(step) == plain.find(step.q_lens)
            found = runner.key_of(shared)
            assert found is not None
            assert found.shares_kv == (known is keys)
            assert found.num_reqs == expected or known is plain
        runner = CudaGraphRunner(lambda _: None, lambda _: (None,), ops, both, 99, "cpu")
        fixed = runner.key_of(replace(shared, fixed_orders=True))
        assert fixed is not None
        assert (fixed.shares_kv, fixed.fixed_orders) == (False, True)


@pytest.mark.parametrize("max_requests", [1, 8, 128])
def test_a_packed_step_finds_the_tightest_graph_that_reads_how_many_rows_are_fed(
    max_requests: int,
) -> None:
    keys = GraphKeys(GraphSupport.RAGGED_Q, max_requests, 15, 1024, with_trees=True)
    chooser = random.Random(max_requests)
    for _ in range(300):
        num_reqs, has_tree = chooser.randint(1, max_requests), chooser.random() < 0.5
        widest, num_tokens = chooser.choice([1, 2, 15, 300]), chooser.randint(1, 1024)
        fits = [
            key
            for key in keys.all
            if key.width > 1
            and key.has_tree == has_tree
            and key.num_reqs >= num_reqs
            and key.num_tokens >= num_tokens
            and (key.tag == "mixed" or widest <= 15)
        ]
        fits = [key for key in fits if key.tag == "ragged"] or fits
        found = keys.find_shape(num_reqs, widest, num_tokens, has_tree, is_packed=True)
        best = min(fits, key=lambda key: (key.num_reqs, key.num_tokens), default=None)
        assert found == best


@pytest.mark.parametrize(
    ("support", "width"), [(GraphSupport.RAGGED_Q, 1), (GraphSupport.UNIFORM_Q, 15)]
)
def test_graphs_that_read_no_numbers_of_rows_replay_no_packed_step(
    support: GraphSupport, width: int
) -> None:
    keys = GraphKeys(support, 8, width, 1024)
    for widest in (1, 7, 30):
        assert keys.find_shape(4, widest, 4 * widest, is_packed=True) is None


def test_the_rows_of_a_packed_step_count_and_not_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    keys = GraphKeys(GraphSupport.RAGGED_Q, 16, 15, 1024)
    ops = TorchStepOps(torch.device("cpu"))
    ids, rows = torch.zeros(20, dtype=torch.int64), torch.arange(16)
    runner = CudaGraphRunner(lambda _: None, lambda batch: (ids,), ops, keys, 100, "cpu")
    starts = torch.arange(17)
    batch = ForwardBatch(ids, ids, ids, rows, [15] * 16, rows + 15, [40] * 16, q_starts=starts)
    key = runner.key_of(batch)
    assert key is not None
    assert (key.tag, key.num_reqs, key.num_tokens) == ("ragged", 16, 32)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("with_trees", [False, True])
def test_a_larger_graph_is_replayed_where_it_is_cheaper(
    support: GraphSupport, with_trees: bool
) -> None:
    """Checks with any prices that what a step replays has room for it, and that none for the same
    steps with room is cheaper by more than times are uncertain."""
    chooser = random.Random(5)
    for max_requests in (1, 8, 64):
        keys = GraphKeys(support, max_requests, 8, 512, with_trees=with_trees)
        costs = {key: chooser.uniform(1, 3) * (10 + key.num_tokens) for key in keys.all}
        steps = [
            [chooser.randint(1, chooser.choice([1, 8, 90])) for _ in range(count)]
            for count in (chooser.randint(1, max_requests) for _ in range(200))
        ]
        before = [keys.find(step) for step in steps]
        keys.prefer_cheaper(costs)
        for step, smallest in zip(steps, before, strict=True):
            found = keys.find(step)
            assert (found is None) == (smallest is None)
            if found is None or smallest is None:
                continue
            fits = [
                key
                for key in keys.all
                if (key.tag, key.has_tree) == (smallest.tag, smallest.has_tree)
                and key.num_reqs >= len(step)
                and key.num_tokens >= sum(step)
                and (key.tag == "mixed" or key.width >= max(step))
            ]
            assert found in fits
            if found == smallest:
                assert costs[found] * (1 - LEAST_SAVING) <= min(costs[key] for key in fits)
            else:
                assert costs[found] == min(costs[key] for key in fits)
        keys.prefer_cheaper({})
        assert [keys.find(step) for step in steps] == before


def test_a_little_cheaper_is_not_worth_more_rows() -> None:
    """Times are not exact; and graphs of other kinds serve other steps."""
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, 8, 256)
    step = [8] * 7
    small = keys.find(step)
    assert small is not None
    assert small.num_tokens == 64
    costs = dict.fromkeys(keys.all, 10.0)
    keys.prefer_cheaper(costs | {small: 10.4})
    assert keys.find(step) == small
    mixed = {key: 1.0 for key in keys.all if key.tag == "mixed"}
    keys.prefer_cheaper(costs | mixed)
    assert keys.find(step) == small
