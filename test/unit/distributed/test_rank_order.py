"""Ranks call the same collectives in the same order, whatever each one's clock says: while they
capture graphs, measure, and run any steps. Otherwise they would wait for each other for ever."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from model_harness import sequence
from recorded_graphs import recorded_graphs, replayable_backends
from sglang.srt.distributed.group import RankGroup
from sglang.srt.model_executor.measured_times import CpuTimer, GpuTimer
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.shard import Shard
from sglang.srt.speculative.tile_spec.profiler import TileSpecProfiler
from sglang.srt.workers.tp_worker import TpModelWorker
from thread_ranks import LoggedGroup, ThreadRanks
from utils import (
    MTP_MAX_ROWS,
    VOCAB_SIZE,
    SchedulerHarness,
    Setup,
    make_execution,
    make_mtp_worker,
    make_random_llama,
)

MASK = VOCAB_SIZE - 1
SETUP = Setup(num_pages=1000, max_running_requests=3, chunked_prefill_size=24)
GRAPHS: dict[str, Any] = {
    "attention_backend": "ragged",
    "device": "cpu",
    "dtype": "float32",
    "max_graph_width": MTP_MAX_ROWS,
    "max_graph_rows": 32,
    "poisons_graphs": False,  # a replay would sum poison
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def with_graphs() -> Iterator[None]:
    with recorded_graphs(), replayable_backends():
        yield


class Priced:
    """Makes workers whose runners replay the cheapest graphs, by clocks that are wrong on each rank
    in another way.

    Args:
        folder: of kept prices.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.prices: list[Any] = []

    def __call__(self, runners: RunnerGroup) -> TpModelWorker:
        group = runners.target.ranks
        rng, now = random.Random(0 if group is None else 1 + group.shard.rank), 0.0

        def clock() -> float:
            nonlocal now
            now += rng.choice([1e-5, 1e-3, 0.1])
            return now

        meter = PriceMeter(runners.target, 3, MTP_MAX_ROWS)
        meter.timer = CpuTimer(float if group is None else group.first_of, clock)
        prices = TileSpecProfiler(self._folder, runners.target).target(meter)
        runners.target.prefer_cheaper_graphs(prices.graphs_ms)
        self.prices.append((prices.graphs_ms, prices.eager, prices.head, prices.spread))
        return make_mtp_worker(runners.target, MASK)


def outputs(harness: SchedulerHarness) -> list[list[int]]:
    """Tokens of prompts of many lengths, plain and with both kinds of masks, some with penalties or
    seeds, which come in turn with steps."""
    kinds: list[dict[str, Any]] = [
        {},
        {"mtp_enabled": True, "mtp_verify": True, "mtp_k": 4},
        {"temperature": 1.0, "sampling_seed": 3},
        {"mtp_enabled": True, "mtp_strategy": ["conf_adapt", 0.05], "mtp_k": 3},
        {"frequency_penalty": 0.5},
    ]
    numbers, chooser = [], random.Random(0)
    for index in range(15):
        params = {"temperature": 0.0, **kinds[index % 5]}
        tokens = sequence(chooser.choice([2, 9, 30, 55]), index)
        numbers.append(harness.submit(tokens, max_new_tokens=chooser.randint(3, 12), **params))
        for _ in range(chooser.randrange(3)):
            harness.step()
    harness.run()
    return [harness.outputs[number].token_ids for number in numbers]


@pytest.mark.usefixtures("with_graphs")
def test_ranks_capture_measure_and_replay_the_same_graphs(llama: Path, tmp_path: Path) -> None:
    execution = make_execution(llama, SETUP, 128, MTP_MAX_ROWS, **GRAPHS)
    ranks = ThreadRanks(execution, 2, group=LoggedGroup)
    ranks.serve(priced := Priced(tmp_path))
    assert priced.prices[0] == priced.prices[1]
    before = len(ranks.ranks[0].group.log)
    given = outputs(SchedulerHarness(SETUP, ranks.worker, resources=ranks.resources))
    ranks.resources.memory["kv_cache"].release()
    ranks.resources.memory["kv_cache"].restore()
    ranks.settle()
    first, second = (rank.group.log for rank in ranks.ranks)
    assert first == second
    assert len(first) > before + 200
    assert all(rank.runners.target.num_graphs > 10 for rank in ranks.ranks)
    alone = make_runners(make_execution(llama, SETUP, 128, MTP_MAX_ROWS, **GRAPHS))
    assert given == outputs(SchedulerHarness(SETUP, Priced(tmp_path / "one")(alone)))


class LateGpu:
    """A queue whose host is slow by chance, another one for each thread."""

    def __init__(self) -> None:
        self._of_thread, self._seeds = threading.local(), itertools.count()

    def launch(self) -> None:
        rng = self._rng
        self._of_thread.now = self._now + rng.choice([0.1, 9.0])
        self._of_thread.end = max(self._end, self._now) + 4.0

    @property
    def _rng(self) -> random.Random:
        known = vars(self._of_thread)
        if "rng" not in known:
            known["rng"] = random.Random(next(self._seeds))
        return known["rng"]

    @property
    def _now(self) -> float:
        return vars(self._of_thread).get("now", 0.0)

    @property
    def _end(self) -> float:
        return vars(self._of_thread).get("end", 0.0)

    def event(self, enable_timing: bool) -> Any:
        at = self._end

        def elapsed(later: Any) -> float:
            return later.at - at

        return SimpleNamespace(
            at=at,
            record=lambda: None,
            query=lambda: self._now >= at,
            synchronize=lambda: None,
            elapsed_time=elapsed,
        )


def groups(folder: Path, num_ranks: int = 2) -> list[RankGroup]:
    with ThreadPoolExecutor(num_ranks) as pool:
        shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
        return list(pool.map(lambda shard: RankGroup(shard, folder / "ranks"), shards))


def test_ranks_time_a_launch_as_often_and_go_by_one_time(tmp_path: Path) -> None:
    gpu, ranks = LateGpu(), groups(tmp_path)

    def times(rank: RankGroup) -> tuple[list[float], int]:
        found, count = list[float](), 0

        def launch() -> None:
            nonlocal count
            count += 1
            gpu.launch()

        for _ in range(20):
            found += GpuTimer(agree=rank.first_of).times_ms(launch, 3)
        return found, count

    with mock.patch("torch.cuda.Event", gpu.event), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(times, ranks)
    assert first == second
    assert first[1] > 20 * 4, "Some runs came late."


class FakeNccl:
    """Stands in for `torch.distributed.ProcessGroupNCCL`. It holds its store as that does: a store
    that ends makes its file anew."""

    made: list[tuple[dist.Store, int, int, dict[str, Any]]]

    class Options(SimpleNamespace): ...

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        self.made.append((store, rank, size, vars(options)))


def test_gpus_are_connected_without_multicast_before_nccl_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = groups(tmp_path)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    with ThreadPoolExecutor(2) as pool:
        if not dist.is_nccl_available():
            with pytest.raises(ValueError, match="needs a torch that is built with NCCL"):
                ranks[0].connect_gpus("cpu", torch.float32)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
        monkeypatch.setattr(FakeNccl, "made", [], raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        list(pool.map(lambda rank: rank.connect_gpus("cpu", torch.bfloat16), ranks))
    assert sorted((rank, size) for _, rank, size, _ in FakeNccl.made) == [(0, 2), (1, 2)]
    assert all(options["global_ranks_in_group"] == [0, 1] for *_, options in FakeNccl.made)
    assert not [*tmp_path.iterdir()], "The files by which ranks meet are gone."
