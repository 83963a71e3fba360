"""Sums of small messages over shared memory: which messages go so, and that all ranks agree on it.
Memory of the CPU and gloo stand in for the GPUs' memory and torch's kernel."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmark.measure import rank_sums
from sglang.srt.distributed import one_shot
from sglang.srt.distributed.group import RankGroup
from sglang.srt.shard import Shard

NUM_RANKS, LIMIT = 2, 1024
BF16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16


class FakeNccl:
    class Options: ...

    def __init__(self, *arguments: Any) -> None: ...


class FakeMemory:
    """Stands in for `_SymmetricMemory`, and for the kernel."""

    TYPES = (BF16, FLOAT32)

    def __init__(self, unable: int | None, lacks: int | None = None) -> None:
        self._unable, self._lacks = unable, lacks
        self._arrivals, self._made = itertools.count(), itertools.count()
        self.num_meetings = 0
        self.ranks: list[RankGroup] = []
        self.summed: list[int] = []  # bytes

    def empty_strided_p2p(
        self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if next(self._made) == self._lacks:
            raise RuntimeError("CUDA out of memory.")
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def rendezvous(self, shared: torch.Tensor, name: str) -> SimpleNamespace:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert not shared.any()
        self.num_meetings += 1
        if next(self._arrivals) == self._unable:
            raise RuntimeError("CUDA driver error: no peer\nin some file")
        return SimpleNamespace(buffer_ptrs=[shared.data_ptr() - 16] * NUM_RANKS)

    def buffer_bytes(self, num_bytes: int, num_ranks: int) -> int:
        return num_bytes * num_ranks

    def num_epochs(self, num_bytes: int) -> int:
        return 1

    def exchange(
        self,
        x: torch.Tensor,
        epochs: torch.Tensor,
        buffers: torch.Tensor,
        num_bytes: int,
        shard: Shard,
    ) -> None:
        assert num_bytes == LIMIT
        assert not epochs.any()
        assert (buffers % 16).tolist() == [buffers[0] % 16] * NUM_RANKS
        self.summed.append(x.nbytes)
        self.ranks[shard.rank]._group.allreduce([x]).wait()


def connected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *problems: int | None
) -> tuple[list[RankGroup], FakeMemory, ThreadPoolExecutor]:
    memory, pool = FakeMemory(*problems or (None,)), ThreadPoolExecutor(NUM_RANKS)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(one_shot, "_SymmetricMemory", memory)
    monkeypatch.setattr(one_shot, "_register_process_group", lambda name, group: None)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    shards = [Shard(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    memory.ranks = [*pool.map(lambda shard: RankGroup(shard, folder / "ranks"), shards)]
    return memory.ranks, memory, pool


@pytest.mark.parametrize(
    ("num_elements", "dtype", "offset", "is_small"),
    [
        (8, BF16, 0, True),
        (LIMIT // 2, BF16, 0, True),
        (LIMIT // 4, FLOAT32, 4, True),
        (LIMIT // 2 + 8, BF16, 0, False),
        (8, FLOAT16, 0, False),  # it has no such sums
        (12, BF16, 0, False),  # 24 bytes
        (8, BF16, 4, False),  # begins after 8 bytes
    ],
)
def test_small_messages_that_the_kernel_takes_are_summed_by_it(
    num_elements: int,
    dtype: torch.dtype,
    offset: int,
    is_small: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, memory, pool = connected(tmp_path, monkeypatch)
    list(pool.map(lambda rank: rank.connect_gpus("cpu", BF16, memory, LIMIT), ranks))
    assert memory.summed == [LIMIT] * NUM_RANKS, "A first sum of the largest message."
    values = torch.arange(num_elements * NUM_RANKS).view(NUM_RANKS, -1) % 64
    wholes = [torch.zeros(num_elements + offset, dtype=dtype) for _ in ranks]
    for whole, value in zip(wholes, values, strict=True):
        whole[offset:] = value
    list(pool.map(lambda rank, whole: rank.sum(whole[None, offset:]), ranks, wholes))
    for whole in wholes:
        assert whole[offset:].tolist() == values.sum(0).tolist()
        assert not whole[:offset].any()
    assert len(memory.summed) == (2 if is_small else 1) * NUM_RANKS


@pytest.mark.parametrize(
    ("problems", "num_meetings", "said"),
    [((1,), NUM_RANKS, "CUDA driver error: no peer"), ((None, 1), 0, "CUDA out of memory.")],
    ids=["cannot read the others", "lacks memory"],
)
def test_one_rank_that_cannot_leaves_all_sums_to_nccl(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problems: tuple[int | None, ...],
    num_meetings: int,
    said: str,
) -> None:
    """And no rank waits for one that has failed before they meet."""
    ranks, memory, pool = connected(tmp_path, monkeypatch, *problems)
    with caplog.at_level(logging.WARNING):
        list(pool.map(lambda rank: rank.connect_gpus("cpu", BF16, memory, LIMIT), ranks))
    assert [rank.one_shot for rank in ranks] == [None, None]
    assert caplog.messages == [f"NCCL sums small messages too, since: {said}"]
    assert memory.num_meetings == num_meetings
    messages = [torch.ones((1, 8)) for _ in ranks]
    list(pool.map(lambda rank, x: rank.sum(x), ranks, messages))
    assert all(message.tolist() == [[2.0] * 8] for message in messages)
    assert not memory.summed


def test_the_benchmark_times_each_size_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sums, "REPEATS", 1)

    def rows(rank: int) -> list[dict[str, Any]]:
        arguments = argparse.Namespace(folder=tmp_path, rank=rank, device="cpu", sums=1)
        return rank_sums.measure(rank_sums.ways_of(tmp_path, rank, "cpu"), arguments)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for found in pool.map(rows, range(NUM_RANKS)):
            assert [row["bytes"] for row in found] == rank_sums.SIZES
            assert all(row["gloo_us"] > 0 and row["equal"] for row in found)
