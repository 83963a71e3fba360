"""Tests how prices of steps and of a head are measured, and graphs for trees."""

from __future__ import annotations

import io
import itertools
import math
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE, write_eagle3
from head_rounds import MAX_REQUESTS, MAX_ROWS, NUM_STEPS, WRITERS, make_head
from priced_server import STEP_MS, curve
from recorded_graphs import UniformAttention, recorded_graphs, replayable_backends
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.layers.forward_batch import DECODE, MIXED, RAGGED, ForwardBatch, GraphKey
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.model_executor import price_measurement
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.model_executor.measured_times import CpuTimer, GpuTimer, Launch, shown
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.model_executor.price_measurement import (
    GRAPH_REPEATS,
    MANY_ROWS,
    PriceMeter,
    graph_finder,
    measure_draft_prices,
    priced_graphs,
    rows_of,
)
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import Curve, PromptChunk, StepShape
from utils import MTP_MAX_ROWS, Setup, make_execution, make_random_llama, make_runner


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("prices"))


@pytest.mark.long_matrix
@pytest.mark.parametrize("support", [GraphSupport.RAGGED_Q, GraphSupport.UNIFORM_Q])
@pytest.mark.parametrize("max_requests", [1, 8, 20, 64, 128])
@pytest.mark.parametrize(
    ("width", "row_width"), [(1, 2), (15, 20), (4, 272), (1, 1024), (15, 1024)]
)
def test_every_graph_is_timed_by_a_step_that_replays_it_and_no_request_is_longer_than_its_row(
    support: GraphSupport, max_requests: int, width: int, row_width: int
) -> None:
    """Rotations and the page table have no room beyond a row. Rows of 1024 tokens fill a graph."""
    keys = GraphKeys(support, max_requests, width, 1024)
    for key in keys.all:
        q_lens = rows_of(key, row_width)
        assert len(q_lens) <= key.num_reqs
        assert 1 <= min(q_lens) <= max(q_lens) <= row_width
        assert sum(q_lens) == min(key.num_tokens, key.num_reqs * row_width)
        found = keys.find(q_lens) if row_width == 1024 else key
        if found != key:  # a prompt fits into a smaller graph with as many rows, always
            assert key.tag == MIXED
            assert found is not None
            assert found.num_tokens == key.num_tokens
            most = min(key.num_reqs, key.num_tokens - key.width)
            assert keys.find([key.num_tokens - most + 1, *[1] * (most - 1)]) == found


def test_on_a_cpu_larger_sizes_and_further_runs_go_when_the_budget_is_spent() -> None:
    now = 0.0
    runs: list[int] = []

    def launch_of(size: int) -> Launch:
        def launch() -> None:
            nonlocal now
            runs.append(size)
            now += size * 1e-3

        return launch

    def timed(*sizes: int) -> Curve:
        runs.clear()
        return CpuTimer(clock=lambda: now).curve_of(sizes, launch_of, "sizes")

    sizes = (1, 10, 30, 1000, 2000)
    found = timed(*sizes)
    assert runs == [1] * 3 + [10] * 3 + [30] * 2 + [1000], "2000 was left out"
    assert found.sizes == sizes[:4]
    assert found.costs_ms == pytest.approx(sizes[:4])
    assert timed(*sizes[3:]).costs_ms == pytest.approx(sizes[3:])
    assert runs == [1000, 2000], "two sizes of a large model, once each"


class QueuedGpu:
    """A host that launches in `host_ms(now)`, and a GPU that computes what is queued; times are in
    milliseconds. Gives what stands in for `torch.cuda.Event`."""

    def __init__(self, host_ms: Callable[[float], float]) -> None:
        self._host_ms = host_ms
        self.now = self._end = 0.0

    def launch(self, took_ms: float) -> None:
        self.now += self._host_ms(self.now)
        self._end = max(self._end, self.now) + took_ms

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace()

        def record() -> None:
            event.at = max(self._end, self.now)

        def synchronize() -> None:
            self.now = max(self.now, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: self.now >= event.at
        event.elapsed_time = lambda later: later.at - event.at
        return event


def measured_graphs(
    keys: GraphKeys, gpu: QueuedGpu, took_ms: Callable[[GraphKey], float]
) -> dict[GraphKey, float]:
    """Prices of graphs that take so long on a GPU."""
    pool = SimpleNamespace(req_to_token=torch.zeros(1, 1))
    model = SimpleNamespace(hidden_width=0)
    runner: Any = SimpleNamespace(req_to_token_pool=pool, model=model, ranks=None)
    meter = PriceMeter(runner, 128, 1)
    meter.timer = GpuTimer()

    def graph_ms(key: GraphKey, repeats: int) -> float:
        return min(GpuTimer().times_ms(lambda: gpu.launch(took_ms(key)), repeats))

    replays = mock.patch.object(meter, "graph_ms", graph_ms)
    with replays, mock.patch("torch.cuda.Event", gpu.event):
        return meter.graphs_ms([key for key in keys.all if key.tag == MIXED])


@pytest.mark.parametrize("start_ms", range(200, 2000, 300))
def test_times_of_graphs_are_the_gpus_while_the_host_is_slow(start_ms: float) -> None:
    """For a while launching takes a host longer than most graphs take. It would then seem that a
    graph costs no less than larger ones, which are timed later, and steps would replay those."""
    keys, truth = GraphKeys(GraphSupport.RAGGED_Q, 128, 1, 1024), curve(STEP_MS)
    gpu = QueuedGpu(lambda now: 24.0 if start_ms < now < start_ms + 300 else 2.0)
    found = measured_graphs(keys, gpu, lambda key: truth.at(key.num_tokens))
    assert found == pytest.approx({key: truth.at(key.num_tokens) for key in found})


@pytest.mark.parametrize("seed", range(3))
def test_a_graph_that_met_a_slow_moment_is_replaced_by_no_larger_one(seed: int) -> None:
    """The GPU was slow when the graph was timed for the first time."""
    keys, rng = GraphKeys(GraphSupport.RAGGED_Q, 128, 1, 1024), random.Random(seed)
    slowness = {key: [rng.uniform(1, 2)] * (1 + GRAPH_REPEATS) for key in keys.all}

    def took_ms(key: GraphKey) -> float:
        return (5.0 + 0.015 * key.num_tokens) * (slowness[key].pop() if slowness[key] else 1.0)

    found = measured_graphs(keys, QueuedGpu(lambda now: 0.1), took_ms)
    keys.prefer_cheaper(found)
    for key in found:
        assert keys.find_shape(key.num_reqs, 2, key.num_tokens) == key


def test_a_host_that_is_always_slower_than_the_gpu_ends_the_measurement() -> None:
    gpu = QueuedGpu(lambda now: 9.0)
    with mock.patch("torch.cuda.Event", gpu.event):
        assert set(GpuTimer().times_ms(lambda: gpu.launch(4.0), 3)) == {9.0}
    assert gpu.now < 300


@pytest.mark.parametrize("takes_long", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_progress_bar_is_shown_in_a_terminal_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, takes_long: bool
) -> None:
    screen, clock = io.StringIO(), itertools.count(step=0.3 if takes_long else 1e-3)
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("tqdm.std.time", clock.__next__)
    assert [*shown([3, 1, 2], "Measuring graphs")] == [3, 1, 2]
    is_shown = is_terminal and takes_long
    assert ("Measuring graphs: 100%" in screen.getvalue()) == is_shown == bool(screen.getvalue())


def test_rows_of_measured_steps_are_fed_different_tokens(model_path: Path) -> None:
    """Equal ones take a GPU less power, and so less time."""
    setup = Setup(num_pages=300, max_running_requests=4)
    runner = make_runner(model_path, setup, 100, MTP_MAX_ROWS, device="cpu")
    fed, forward = list[torch.Tensor](), runner.forward

    def note(batch: ForwardBatch) -> ForwardResult:
        fed.append(batch.input_ids)
        return forward(batch)

    with mock.patch.object(runner, "forward", note):
        table = PriceMeter(runner, 4, MTP_MAX_ROWS).measure()
    assert table.find(4, 1, 4) is None
    assert table.eager.sizes[:4] == (1, 2, 4, 8)
    assert min(table.eager.costs_ms) > 0 <= min(table.kv_ms, table.row_kv_ms, table.spread)
    wide = [ids for ids in fed if len(ids) >= 16]
    assert wide
    assert all(len(ids.unique()) > len(ids) // 4 for ids in wide)


@pytest.mark.parametrize(("is_cpu", "least_rows"), [(True, 1), (False, 1), (False, 300)])
def test_rows_and_attention_of_prompts_are_told_apart(
    model_path: Path, is_cpu: bool, least_rows: int
) -> None:
    """A device whose steps take 1 ms, 0.01 ms a row, and 1e-5 ms for each pair of a row and a token
    that it sees, where fewer rows of a prompt take as long as `least_rows`."""
    runner = make_runner(model_path, Setup(num_pages=100), 4096, 1, device="cpu")
    runner.max_prompt_rows = 1500
    now, longest, asked = 0.0, 0, set[int]()

    def forward(batch: ForwardBatch) -> ForwardResult:
        nonlocal now, longest
        steps = zip(batch.q_lens, batch.kv_len_upper_bounds, strict=True)
        chunks = [PromptChunk(kv_len - q_len, q_len) for q_len, kv_len in steps]
        seen = [chunk.position + (chunk.num_rows + 1) / 2 for chunk in chunks]
        rows = [max(chunk.num_rows, least_rows) for chunk in chunks]
        num_pairs = sum(map(operator.mul, rows, seen))
        now += (1.0 + 0.01 * sum(batch.q_lens) + 1e-5 * num_pairs) / 1e3
        longest = max(longest, *batch.kv_len_upper_bounds)
        table = runner.req_to_token_pool.req_to_token
        asked.update(table[0, : max(batch.kv_len_upper_bounds)].tolist())
        return ForwardResult(torch.zeros(sum(batch.q_lens), 64), used_graph=False)

    with mock.patch.object(runner, "forward", forward):
        meter = PriceMeter(runner, 4, 1)
        meter.timer = cpu = CpuTimer(clock=lambda: now)
        if not is_cpu:
            meter.timer = GpuTimer(clock=lambda: now)
            cpu.most_ms = math.inf
        with mock.patch.object(meter.timer, "times_ms", cpu.times_ms):
            table = meter.measure()
    for num_rows in (1500, *(512, 128) * (not is_cpu), 64, *(8,) * is_cpu):
        if num_rows <= table.prompt_kv_ms.sizes[-1]:
            expected = 1e-5 * max(num_rows, least_rows, table.prompt_kv_ms.sizes[0])
            assert table.prompt_kv_ms.at(num_rows) == pytest.approx(expected, rel=0.01)
    assert table.eager.sizes[-1] == (1152 if is_cpu else 1500), "a CPU has spent its budget"
    for num_rows, cost_ms in zip(table.eager.sizes, table.eager.costs_ms, strict=True):
        assert cost_ms == pytest.approx(1.0 + 0.01 * num_rows, rel=0.08)
    assert longest > 1000
    assert max(asked) <= 100, "a slot outside of the pool"
    assert not runner.req_to_token_pool.req_to_token.any(), "no request's rows are left written"


@pytest.mark.parametrize(
    ("max_prompt_rows", "max_requests", "expected"),
    [
        (8192, 64, [*MANY_ROWS]),
        (3000, 64, [*range(1152, 2049, 128), 2560, 3000]),
        (512, 128, [*range(1152, 1920, 128), 1920]),
        (32768, 64, [*MANY_ROWS]),
        (512, 8, [512]),
    ],
)
def test_steps_that_replay_no_graph_are_measured_up_to_the_largest(
    model_path: Path, max_prompt_rows: int, max_requests: int, expected: list[int]
) -> None:
    runner = make_runner(model_path, Setup(), 512, 1, device="cpu")
    runner.max_prompt_rows = max_prompt_rows
    meter = PriceMeter(runner, max_requests, 15)
    assert meter.eager_rows()[-len(expected) :] == expected
    for graph_rows in (64, 2048):
        keys = GraphKeys(GraphSupport.RAGGED_Q, 8, 1, graph_rows)
        without = [size for size in expected if size >= graph_rows] or expected[-1:]
        with mock.patch.object(type(runner), "graph_keys", keys):
            assert meter.eager_rows() == without


@pytest.mark.parametrize(("max_width", "tags"), [(1, {MIXED}), (3, {DECODE, MIXED, RAGGED})])
def test_steps_that_nobody_prices_are_not_measured(
    model_path: Path, max_width: int, tags: set[str]
) -> None:
    runner = make_runner(model_path, Setup(), 512, 1, device="cpu")
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, max_width, 64)
    with mock.patch.object(type(runner), "graph_keys", keys):
        assert priced_graphs(runner, max_width) == [key for key in keys.all if key.tag in tags]


# ---------------------------------------------------------------- heads, and graphs for trees

SHAPES = [TreeShape(4, 3, 9), TreeShape(3, 1, 2)]
RAGGED_GRAPHS: dict[str, Any] = {"attention_backend": "ragged", "max_graph_width": MAX_ROWS}


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
        changes = RAGGED_GRAPHS if has_graphs else {}
        head = make_head(target, head_path, EAGLE3, 1, shapes, **changes)
        name = "draft" if shapes is NUM_STEPS else "draft_trees"
        draft = getattr(head, name)

        def noting(first: Any, shape: DraftShape) -> Any:
            drafted[shape] += 1
            return draft(first, shape)

        replayed.clear()
        clock = cpu_clock(itertools.count(step=1e-5).__next__)  # no size is left out for time
        with clock, mock.patch.object(head, name, noting):
            prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, shapes)
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


def cpu_clock(clock: Callable[[], float]) -> Any:
    """Has CPUs timed by this clock, as long as it lasts."""
    return mock.patch.object(price_measurement, "CpuTimer", partial(CpuTimer, clock=clock))


class ReadingClock:
    """Shows, at work, 1 us for each token of KV that attention has read in a first layer, and some
    time for each look at it."""

    def __init__(self) -> None:
        self._num_planned = self._num_us = 0

    def __call__(self) -> float:
        self._num_us += 1
        return 1e-6 * self._num_us

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs while this lasts."""
        plan, forward = TorchNativeBackend.plan, TorchNativeBackend.forward

        def planned(backend: TorchNativeBackend, batch: ForwardBatch) -> None:
            self._num_planned = int(batch.kv_lens.sum())
            plan(backend, batch)

        def ran(backend: TorchNativeBackend, layer: int, q: torch.Tensor) -> torch.Tensor:
            self._num_us += self._num_planned if layer == 0 else 0
            return forward(backend, layer, q)

        with mock.patch.multiple(TorchNativeBackend, plan=planned, forward=ran):
            yield


@pytest.mark.parametrize(
    ("kind", "reads"), [(EAGLE, {1: 1, 3: 3}), (P_EAGLE, {1: 1, 3: 1}), (DFLASH, {1: 1, 3: 1})]
)
def test_a_pass_is_priced_with_all_kv_that_it_reads(
    tmp_path: Path, kind: str, reads: dict[int, int]
) -> None:
    """Draft steps read it once each, rows over mask tokens together. A head of blocks only stores
    KV when it is fed, so nothing that is measured there tells what its block reads."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    clock, head = ReadingClock(), make_head(target, WRITERS[kind](tmp_path / "head"), kind, 1)
    with clock.at_work(), cpu_clock(clock):
        prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, NUM_STEPS)
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


@pytest.mark.parametrize(
    ("backend", "max_width"), [("ragged", 1), ("ragged", MAX_ROWS), ("uniform", MAX_ROWS)]
)
def test_the_price_of_each_graph_is_the_time_of_its_replay(
    model_path: Path, backend: str, max_width: int
) -> None:
    """Also of those that compute only the rows that are read, where no request looks ahead."""
    setup = Setup(num_pages=200, max_running_requests=4)
    more: Any = {"attention_backend": backend, "max_graph_width": max_width, "max_graph_rows": 32}
    with noted_replays() as replayed:
        runner = make_runners(make_execution(model_path, setup, 64, max_width, **more)).target
        meter = PriceMeter(runner, 4, max_width)
        for key in priced_graphs(runner, max_width):
            replayed.clear()
            meter.graph_ms(key, 1)
            assert {each.num_tokens for each in replayed} == {key.num_tokens}
            assert {each.skips_unread_rows for each in replayed} == {key.skips_unread_rows}


def test_graphs_for_trees_have_prices_and_are_those_that_steps_of_trees_are_priced_by(
    model_path: Path,
) -> None:
    setup = Setup(num_pages=200, max_running_requests=4)
    with noted_replays() as replayed:
        more: Any = {**RAGGED_GRAPHS, "captures_trees": True, "max_graph_rows": 32}
        runner = make_runners(make_execution(model_path, setup, 64, MAX_ROWS, **more)).target
        keys = runner.graph_keys
        assert keys is not None
        assert any(key.has_tree for key in keys.all)
        replayed.clear()
        prices = PriceMeter(runner, 4, MAX_ROWS).measure()
    assert prices.graphs_ms.keys() == {*priced_graphs(runner, MAX_ROWS)} == {*keys.all}
    assert {key for key in keys.all if key.has_tree and key.tag != "mixed"} <= {*replayed}
    for num_reqs, widest in itertools.product((1, 3, 4), (1, 2, MAX_ROWS)):
        for num_rows in {num_reqs, num_reqs + widest - 1, num_reqs * widest}:
            found = prices.find(num_reqs, widest, num_rows)
            assert found == keys.find_shape(num_reqs, widest, num_rows, has_tree=widest > 1)
            assert found is not None
            assert prices.rows_ms(num_reqs, widest, num_rows) == prices.graphs_ms[found]


def test_trees_that_replay_no_graph_are_priced_without_one(model_path: Path) -> None:
    without = replace(UniformAttention.capabilities(), captures_trees=False)
    more: Any = {"attention_backend": "uniform", "max_graph_width": 8, "captures_trees": True}
    setup = Setup(num_pages=200, max_running_requests=4)
    no_trees = mock.patch.object(UniformAttention, "capabilities", return_value=without)
    with recorded_graphs(), replayable_backends(), no_trees:
        find = graph_finder(make_runners(make_execution(model_path, setup, 64, 8, **more)).target)
    assert find(3, 1, 3) is not None
    assert find(3, 8, 24) is None
