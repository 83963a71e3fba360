"""Sums over shared memory: which messages go so, and that all ranks agree on it. Memory of the CPU
and gloo stand in for the GPUs' memory and the kernels."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmark.measure import rank_sums
from sglang.srt.distributed import one_shot
from sglang.srt.distributed.group import FIRST_MESSAGES, RankGroup
from sglang.srt.layers.ops import rank_exchange
from sglang.srt.shard import Shard

NUM_RANKS, LIMIT = 2, 1024
BF16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16


class FakeNccl:
    class Options: ...

    def __init__(self, *arguments: Any) -> None: ...


class FakeRoom(NamedTuple):
    num_bytes: int = 4 * LIMIT
    num_epochs: int = 1


class FakeMemory:
    """Stands in for `_SymmetricMemory`, and for the kernels."""

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

    def takes(self, x: torch.Tensor, room: FakeRoom) -> bool:
        return x.nbytes <= LIMIT

    def exchange(
        self,
        x: torch.Tensor,
        epochs: torch.Tensor,
        buffers: torch.Tensor,
        room: FakeRoom,
        rank: int,
    ) -> None:
        assert room == FakeRoom()
        assert not epochs.any()
        assert (buffers % 16).tolist() == [buffers[0] % 16] * NUM_RANKS
        self.summed.append(x.nbytes)
        self.ranks[rank]._group.allreduce([x]).wait()


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
    ("num_elements", "dtype", "offset", "rooms"),
    [
        (8, BF16, 0, "LINES and BLOCKS, LINES"),
        (512, FLOAT16, 0, "LINES and BLOCKS, LINES"),
        (256, FLOAT32, 4, "LINES and BLOCKS, LINES"),
        (512 + 8, BF16, 0, "LINES and BLOCKS"),
        (10**6, BF16, 0, "LINES and BLOCKS"),
        (8, torch.float64, 0, ""),  # it has no such sums
        (12, BF16, 0, ""),  # 24 bytes
        (8, BF16, 4, ""),  # begins after 8 bytes
    ],
)
def test_kernels_take_messages_of_whole_vectors(
    num_elements: int, dtype: torch.dtype, offset: int, rooms: str
) -> None:
    lines = rank_exchange.Room(NUM_RANKS, LIMIT, 0)
    both = lines._replace(piece_bytes=rank_exchange.BLOCK_BYTES)
    x = torch.zeros(num_elements + offset, dtype=dtype)[offset:]
    found = {"LINES and BLOCKS": both, "LINES": lines}
    assert ", ".join(name for name in found if rank_exchange.takes(x, found[name])) == rooms


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_large_messages_of_two_ranks_go_in_blocks(num_ranks: int) -> None:
    room = rank_exchange.room_of(num_ranks)
    assert room.lines_bytes == {2: 1 << 19, 3: 1 << 19, 8: 149_792}[num_ranks]
    small = torch.zeros((1 << 18) // (num_ranks - 1) // 4 * 4)
    assert rank_exchange.takes(small, room)
    for larger in (torch.zeros(len(small) + 4), torch.zeros(1 << 21)):
        assert rank_exchange.takes(larger, room) == (num_ranks == 2)


@pytest.mark.parametrize("is_taken", [True, False])
def test_messages_that_the_kernels_take_are_summed_by_them(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, memory, pool = connected(tmp_path, monkeypatch)
    list(pool.map(lambda rank: rank.connect_gpus("cpu", BF16, memory, FakeRoom()), ranks))
    taken = [size for size in FIRST_MESSAGES if size <= LIMIT]
    assert sorted(memory.summed) == sorted(taken * NUM_RANKS), "First messages compile kernels."
    num_elements = LIMIT // 4 if is_taken else LIMIT
    values = torch.arange(NUM_RANKS * num_elements).view(NUM_RANKS, -1)
    wholes = [value.float()[None] for value in values]
    found = list(pool.map(lambda rank, x: rank.sum(x), ranks, wholes))
    for total in found:
        assert total[0].tolist() == values.sum(0).tolist()
    assert len(memory.summed) == (len(taken) + is_taken) * NUM_RANKS


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
        list(pool.map(lambda rank: rank.connect_gpus("cpu", BF16, memory, FakeRoom()), ranks))
    assert [rank.one_shot for rank in ranks] == [None, None]
    assert caplog.messages == [f"NCCL sums all messages, since: {said}"]
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
