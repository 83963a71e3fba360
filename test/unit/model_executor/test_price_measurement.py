"""Tests how prices of steps are measured."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from priced_server import STEP_MS, curve
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import DECODE, MIXED, RAGGED, ForwardBatch, GraphKey
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.model_executor.measured_times import CpuTimer, GpuTimer, Launch
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.model_executor.price_measurement import (
    GRAPH_REPEATS,
    MANY_ROWS,
    PriceMeter,
    priced_graphs,
    rows_of,
)
from sglang.srt.step.price_table import PromptChunk
from utils import MTP_MAX_ROWS, Setup, make_random_llama, make_runner


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


def test_passes_over_all_sizes_end_with_the_budget() -> None:
    now = 0.0
    runs: list[int] = []

    def launch_of(size: int) -> Launch:
        def launch() -> None:
            nonlocal now
            runs.append(size)
            now += size * 1e-3

        return launch

    def timed(sizes: tuple[int, ...], budget_s: float) -> dict[int, list[float]]:
        runs.clear()
        return CpuTimer(lambda: now).times_of(sizes, launch_of, budget_s, "sizes")

    times = timed((1, 10, 100, 1000), 0.3)
    assert runs == [1, 10, 100, 1000], "the last one alone took all the time"
    assert times == {size: pytest.approx([size]) for size in runs}
    timed((1, 10, 100, 1000), 0.15)
    assert runs == [1, 10, 100]
    times = timed((1, 10, 100), 1.0)
    assert times == {size: pytest.approx([size] * 3) for size in (1, 10, 100)}
    assert runs == [1, 10, 100] * 4


class QueuedGpu:
    """A host that launches in `host_ms(now)`, and a GPU that computes what is queued; times are in
    milliseconds."""

    def __init__(self, host_ms: Callable[[float], float]) -> None:
        self._host_ms = host_ms
        self.now = self._end = 0.0

    def launch(self, took_ms: float) -> None:
        self.now += self._host_ms(self.now)
        self._end = max(self._end, self.now) + took_ms

    def event(self, enable_timing: bool) -> QueuedEvent:
        return QueuedEvent(self)

    def end_of_queue(self) -> float:
        return max(self._end, self.now)


class QueuedEvent:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, gpu: QueuedGpu) -> None:
        self._gpu, self._at = gpu, 0.0

    def record(self) -> None:
        self._at = self._gpu.end_of_queue()

    def query(self) -> bool:
        return self._gpu.now >= self._at

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self._at)

    def elapsed_time(self, later: QueuedEvent) -> float:
        return later._at - self._at


def measured_graphs(
    keys: GraphKeys, gpu: QueuedGpu, took_ms: Callable[[GraphKey], float]
) -> dict[GraphKey, float]:
    """Prices of graphs that take so long on a GPU."""
    pool = SimpleNamespace(req_to_token=torch.zeros(1, 1))
    model = SimpleNamespace(hidden_width=0)
    runner: Any = SimpleNamespace(req_to_token_pool=pool, model=model, ranks=None)
    meter = PriceMeter(runner, 128, 1, make_timer=GpuTimer)

    def graph_ms(key: GraphKey, repeats: int) -> float:
        return min(GpuTimer().times_ms(lambda: gpu.launch(took_ms(key)), repeats))

    replays = mock.patch.object(meter, "graph_ms", graph_ms)
    with replays, mock.patch("torch.cuda.Event", gpu.event):
        return meter.graphs_ms([key for key in keys.all if key.tag == MIXED])


@pytest.mark.parametrize("start_ms", range(200, 2000, 300))
def test_times_of_graphs_are_the_gpus_while_the_host_is_slow(
    start_ms: float,
) -> None:
    """For a while launching takes a host longer than most graphs take. It would then seem that a
    graph costs no less than larger ones, which are timed later, and steps would replay those."""
    keys, truth = GraphKeys(GraphSupport.RAGGED_Q, 128, 1, 1024), curve(STEP_MS)

    def host_ms(now: float) -> float:
        return 24.0 if start_ms < now < start_ms + 300 else 2.0

    found = measured_graphs(keys, QueuedGpu(host_ms), lambda key: truth.at(key.num_tokens))
    assert found == pytest.approx({key: truth.at(key.num_tokens) for key in found})


@pytest.mark.parametrize("seed", range(3))
def test_a_graph_that_met_a_slow_moment_is_replaced_by_no_larger_one(seed: int) -> None:
    """The GPU was slow when the graph was timed for the first time."""
    keys, rng = GraphKeys(GraphSupport.RAGGED_Q, 128, 1, 1024), random.Random(seed)
    slowness = {key: [rng.uniform(1, 2)] * (1 + GRAPH_REPEATS) for key in keys.all}

    def took_ms(key: GraphKey) -> float:
        slow = slowness[key].pop() if slowness[key] else 1.0
        return (5.0 + 0.015 * key.num_tokens) * slow

    found = measured_graphs(keys, QueuedGpu(lambda now: 0.1), took_ms)
    keys.prefer_cheaper(found)
    for key in found:
        assert keys.find_shape(key.num_reqs, 2, key.num_tokens) == key


def test_a_host_that_is_always_slower_than_the_gpu_ends_the_measurement() -> None:
    gpu = QueuedGpu(lambda now: 9.0)
    with mock.patch("torch.cuda.Event", gpu.event):
        assert set(GpuTimer().times_ms(lambda: gpu.launch(4.0), 3)) == {9.0}
    assert gpu.now < 300


@pytest.mark.parametrize(
    ("timer", "is_terminal", "is_shown"),
    [(GpuTimer(), True, True), (GpuTimer(), False, False), (CpuTimer(), True, False)],
)
def test_a_progress_bar_is_shown_on_a_gpu_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, timer: GpuTimer, is_terminal: bool, is_shown: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    assert [*timer.shown([3, 1, 2], "graphs")] == [3, 1, 2]
    assert ("Measuring graphs: 100%" in screen.getvalue()) == is_shown
    assert is_shown or not screen.getvalue()


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
        num_pairs = sum(max(each.num_rows, least_rows) * each.mean_seen for each in chunks)
        now += (1.0 + 0.01 * sum(batch.q_lens) + 1e-5 * num_pairs) / 1e3
        longest = max(longest, *batch.kv_len_upper_bounds)
        table = runner.req_to_token_pool.req_to_token
        asked.update(table[0, : max(batch.kv_len_upper_bounds)].tolist())
        return ForwardResult(torch.zeros(sum(batch.q_lens), 64), used_graph=False)

    with mock.patch.object(runner, "forward", forward):
        kind = CpuTimer if is_cpu else GpuTimer
        meter = PriceMeter(runner, 4, 1, lambda: now, kind)
        with mock.patch.object(meter.timer, "times_ms", CpuTimer(lambda: now).times_ms):
            table = meter.measure()
    for num_rows in (1500, *(512, 128) * (not is_cpu), 64, *(8,) * is_cpu):
        if num_rows <= table.prompt_kv_ms.sizes[-1]:
            expected = 1e-5 * max(num_rows, least_rows, table.prompt_kv_ms.sizes[0])
            assert table.prompt_kv_ms.at(num_rows) == pytest.approx(expected, rel=0.01)
    assert table.eager.sizes[-1] == (1408 if is_cpu else 1500)
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
    meter = PriceMeter(runner, max_requests, 15, make_timer=GpuTimer)
    assert meter.eager_rows()[-len(expected) :] == expected
    with mock.patch.object(type(runner), "graph_keys", GraphKeys(GraphSupport.RAGGED_Q, 8, 1, 64)):
        assert meter.eager_rows() == expected


@pytest.mark.parametrize(("max_width", "tags"), [(1, {MIXED}), (3, {DECODE, MIXED, RAGGED})])
def test_steps_that_nobody_prices_are_not_measured(
    model_path: Path, max_width: int, tags: set[str]
) -> None:
    runner = make_runner(model_path, Setup(), 512, 1, device="cpu")
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, max_width, 64)
    with mock.patch.object(type(runner), "graph_keys", keys):
        priced = priced_graphs(runner, max_width)
    assert {key.tag for key in priced} == tags
    assert priced == [key for key in keys.all if key.tag in tags]
