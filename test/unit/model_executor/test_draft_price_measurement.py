"""Tests how prices of a head are measured, and graphs for trees."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE, write_eagle3
from head_rounds import MAX_REQUESTS, MAX_ROWS, NUM_STEPS, WRITERS, make_head
from recorded_graphs import UniformAttention, recorded_graphs, replayable_backends
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.price_measurement import (
    PriceMeter,
    graph_finder,
    measure_draft_prices,
    priced_graphs,
)
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import StepShape
from utils import Setup, make_execution, make_random_llama

SHAPES = [TreeShape(4, 3, 9), TreeShape(3, 1, 2)]
RAGGED = {"attention_backend": "ragged"}


@contextmanager
def noted_replays() -> Iterator[list[GraphKey]]:
    """Notes which recorded graphs are replayed while this lasts."""
    run, replayed = CudaGraphRunner.run, list[GraphKey]()

    def replay(graphs: Any, key: GraphKey, batch: Any) -> Any:
        replayed.append(key)
        return run(graphs, key, batch)

    counting = mock.patch.object(CudaGraphRunner, "run", replay)
    with recorded_graphs(), replayable_backends(), counting:
        yield replayed


@pytest.mark.long_matrix
@pytest.mark.parametrize("shapes", [NUM_STEPS, SHAPES], ids=["chains", "trees"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_what_a_head_does_in_a_round_is_timed(
    tmp_path: Path, shapes: Sequence[DraftShape], has_graphs: bool
) -> None:
    """Each graph that serves steps is timed by a replay; passes of each shape, of any number of
    requests, as one graph where there are graphs."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    head_path, drafted = write_eagle3(tmp_path / "head"), Counter[DraftShape]()
    with noted_replays() as replayed:
        changes: Any = {**RAGGED, "max_graph_width": MAX_ROWS} if has_graphs else {}
        head = make_head(target, head_path, EAGLE3, 1, shapes, **changes)
        name = "draft" if shapes is NUM_STEPS else "draft_trees"
        draft = getattr(head, name)

        def noting(first: Any, shape: DraftShape) -> Any:
            drafted[shape] += 1
            return draft(first, shape)

        replayed.clear()
        with mock.patch.object(head, name, noting):
            clock = itertools.count(step=1e-5).__next__  # no size is left out for time
            prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, shapes, clock)
    assert [*prices.passes] == [*shapes]
    for shape, drafting in prices.passes.items():
        curve = drafting.by_requests
        assert curve.sizes == (1, 2, 4, 8, MAX_REQUESTS)
        assert min(curve.costs_ms) > 0
        assert drafted[shape] >= len(curve.sizes)
    assert prices.extend.head.at(1) > 0
    num_replayed = sum(key.tag == "draft steps" for key in replayed)
    assert num_replayed == drafted.total() * has_graphs
    assert {*prices.extend.graphs_ms} <= {*replayed}
    assert bool(prices.extend.graphs_ms) == has_graphs
    for num_reqs, width in itertools.product((1, 5, MAX_REQUESTS), (1, 2, MAX_ROWS)):
        key = prices.extend.find(num_reqs, width, num_reqs * width)
        assert (key is not None) == has_graphs
        assert key is None or prices.extend.graphs_ms[key] > 0
        assert prices.extend.rows_ms(num_reqs, width, num_reqs * width) > 0


class ReadingClock:
    """Shows 1 us for each token of KV that attention has read in a first layer, and some time for
    each look at it."""

    def __init__(self) -> None:
        self.num_planned = self.num_read = self._num_looks = 0

    def __call__(self) -> float:
        self._num_looks += 1
        return 1e-6 * (self.num_read + self._num_looks)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs while this lasts."""
        backend, clock = TorchNativeBackend, self
        plan, forward = backend.plan, backend.forward

        def planned(self: TorchNativeBackend, batch: ForwardBatch) -> None:
            clock.num_planned = int(batch.kv_lens.sum())
            plan(self, batch)

        def ran(self: TorchNativeBackend, layer: int, q: torch.Tensor) -> torch.Tensor:
            clock.num_read += clock.num_planned if layer == 0 else 0
            return forward(self, layer, q)

        with mock.patch.multiple(backend, plan=planned, forward=ran):
            yield


@pytest.mark.parametrize(
    ("kind", "reads"),
    [(EAGLE, {1: 1, 3: 3}), (P_EAGLE, {1: 1, 3: 1}), (DFLASH, {1: 1, 3: 1})],
)
def test_a_pass_is_priced_with_all_kv_that_it_reads(
    tmp_path: Path, kind: str, reads: dict[int, int]
) -> None:
    """Draft steps read it once each, rows over mask tokens together. A head of blocks only stores
    KV when it is fed, so nothing that is measured there tells what its block reads."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    clock, head = ReadingClock(), make_head(target, WRITERS[kind](tmp_path / "head"), kind, 1)
    with clock.at_work():
        prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, NUM_STEPS, clock)
    us = {shape: 1e3 * each.kv_ms for shape, each in prices.passes.items()}
    assert us == pytest.approx(reads)
    assert 1e3 * prices.extend.kv_ms == pytest.approx(0 if kind == DFLASH else 1)
    rounds = MeasuredRoundPrices(prices.extend, prices, num_free=int(kind != DFLASH))
    for num_drafts in (1, 3):
        short, long = (rounds.round_ms(StepCase(2, kv), num_drafts) for kv in (0, 1000))
        of_rows = 2 * prices.extend.attention_ms(StepShape(2, 0, 0, 0, 1000, 0))
        num_steps = num_drafts - rounds.num_free
        drafting = reads[3 if num_steps > 1 else 1] if num_steps else 0
        assert long - short == pytest.approx(of_rows + drafting, abs=0.01)


def test_graphs_for_trees_have_prices_and_are_those_that_steps_of_trees_are_priced_by(
    tmp_path: Path,
) -> None:
    model, width = make_random_llama(tmp_path / "target"), 8
    setup = Setup(num_pages=200, max_running_requests=4)
    with noted_replays() as replayed:
        more: Any = {**RAGGED, "max_graph_width": width, "max_graph_rows": 32}
        execution = make_execution(model, setup, 64, width, captures_trees=True, **more)
        runner = make_runners(execution).target
        keys = runner.graph_keys
        assert keys is not None
        assert keys.have_trees
        replayed.clear()
        prices = PriceMeter(runner, 4, width).measure()
    assert prices.graphs_ms.keys() == {*priced_graphs(runner, width)} == {*keys.all}
    assert {key for key in keys.all if key.has_tree and key.tag != "mixed"} <= {*replayed}
    for num_reqs, widest in itertools.product((1, 3, 4), (1, 2, width)):
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
