"""Tests that costs of rounds of trees are measured: graphs for trees, and the passes that draft
them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from draft_heads import EAGLE, EAGLE3
from head_rounds import MAX_REQUESTS, MAX_ROWS, WRITERS, make_head
from recorded_graphs import UniformAttention, recorded_graphs, replayable_backends
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.price_measurement import (
    PriceMeter,
    graph_finder,
    measure_draft_prices,
    priced_graphs,
)
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.step.draft_shapes import TreeShape
from utils import Setup, make_execution, make_random_llama

SHAPES = [TreeShape(4, 3, 9), TreeShape(3, 1, 2)]


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_passes_that_draft_trees_are_timed(tmp_path: Path, kind: str, has_graphs: bool) -> None:
    """Each of its own shape; as one graph where there are graphs."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    head_path = WRITERS[kind](tmp_path / "head")
    drafted, replayed = Counter[TreeShape](), Counter[str]()
    run = CudaGraphRunner.run

    def replay(graphs: Any, key: GraphKey, batch: Any) -> Any:
        replayed[key.tag] += 1
        return run(graphs, key, batch)

    with (
        recorded_graphs(),
        replayable_backends(),
        mock.patch.object(CudaGraphRunner, "run", replay),
    ):
        changes = {"attention_backend": "ragged", "max_graph_width": MAX_ROWS} if has_graphs else {}
        head = make_head(target, head_path, kind, 1, SHAPES, **changes)
        draft = head.draft_trees

        def noting(first: Any, shape: TreeShape) -> Any:
            drafted[shape] += 1
            return draft(first, shape)

        replayed.clear()
        with mock.patch.object(head, "draft_trees", noting):
            clock = itertools.count(step=1e-5).__next__  # no size is left out for time
            prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, SHAPES, clock)
    assert [*prices.passes] == SHAPES
    for shape, drafting in prices.passes.items():
        curve = drafting.by_requests
        assert curve.sizes == (1, 2, 4, 8, MAX_REQUESTS)
        assert min(curve.costs_ms) > 0
        assert drafted[shape] >= len(curve.sizes)
    assert (replayed["draft steps"] == drafted.total()) == has_graphs


def test_graphs_for_trees_have_prices_and_are_those_that_steps_of_trees_are_priced_by(
    tmp_path: Path,
) -> None:
    model = make_random_llama(tmp_path / "target")
    setup = Setup(num_pages=200, max_running_requests=4)
    width, replayed = 8, list[GraphKey]()
    run = CudaGraphRunner.run

    def replay(graphs: Any, key: GraphKey, batch: Any) -> Any:
        replayed.append(key)
        return run(graphs, key, batch)

    with (
        recorded_graphs(),
        replayable_backends(),
        mock.patch.object(CudaGraphRunner, "run", replay),
    ):
        more = {"attention_backend": "ragged", "max_graph_width": width, "max_graph_rows": 32}
        execution = make_execution(model, setup, 64, width, captures_trees=True, **more)
        runner = make_runners(execution).target
        keys = runner.graph_keys
        assert keys is not None
        assert keys.have_trees
        replayed.clear()
        prices = PriceMeter(runner, 4, width).measure()
    assert prices.graphs_ms.keys() == {*priced_graphs(runner, width)} == {*keys.all}
    assert {key for key in keys.all if key.has_tree and key.tag != "mixed"} <= {*replayed}
    for num_reqs in (1, 3, 4):
        for widest in (1, 2, width):
            for num_rows in {num_reqs, num_reqs + widest - 1, num_reqs * widest}:
                found = prices.find(num_reqs, widest, num_rows)
                assert found == keys.find_shape(num_reqs, widest, num_rows, has_tree=widest > 1)
                assert found is not None
                assert prices.rows_ms(num_reqs, widest, num_rows) == prices.graphs_ms[found]


def test_trees_that_replay_no_graph_are_priced_without_one(tmp_path: Path) -> None:
    model = make_random_llama(tmp_path / "target")
    setup = Setup(num_pages=200, max_running_requests=4)
    with recorded_graphs(), replayable_backends():
        more = {"attention_backend": "uniform", "max_graph_width": 8}
        known = UniformAttention.capabilities()
        without = replace(known, captures_trees=False)
        with mock.patch.object(UniformAttention, "capabilities", return_value=without):
            execution = make_execution(model, setup, 64, 8, captures_trees=True, **more)
            find = graph_finder(make_runners(execution).target)
    assert find(3, 1, 3) is not None
    assert find(3, 8, 24) is None
