"""Several ranks of a model in the threads of one process: their frames go through queues, their
sums through gloo, as between processes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from recorded_graphs import graph_being_recorded
from sglang.srt.control.control import ModelResources
from sglang.srt.distributed.group import RankGroup
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.rank_calls import calls_of, resources_of_ranks
from sglang.srt.processes.resources import make_resources
from sglang.srt.shard import Shard
from sglang.srt.workers.broadcast_worker import BroadcastWorker, follow
from sglang.srt.workers.tp_worker import TpModelWorker

T = TypeVar("T")
MakeWorker = Callable[[RunnerGroup], TpModelWorker]


@dataclass(frozen=True)
class ThreadRank:
    """One rank."""

    group: RankGroup
    runners: RunnerGroup
    worker: TpModelWorker


class _End(Exception):
    """Ends a thread that follows."""


class LoggedGroup(RankGroup):
    """A rank whose collectives are noted, also those of the replays of recorded graphs.

    Attributes:
        log: kind, shape and type of each, in order.
    """

    def __init__(self, shard: Shard, meeting_point: Path) -> None:
        self.log: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        super().__init__(shard, meeting_point)

    def all_reduce(self, x: torch.Tensor) -> None:
        self._noted("sum", x, lambda: super(LoggedGroup, self).all_reduce(x))

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        self._noted("join", x, lambda: super(LoggedGroup, self).all_gather(parts, x))

    def _noted(self, kind: str, x: torch.Tensor, work: Callable[[], None]) -> None:
        def run() -> None:
            self.log.append((kind, tuple(x.shape), x.dtype))
            work()

        run()
        if (graph := graph_being_recorded()) is not None:
            graph.record(run, (), {}, None)


class ThreadRanks:
    """Ranks that hold a model together.

    Args:
        execution: of the whole model.
        make: makes each rank's worker.
        group: of each rank.

    Attributes:
        ranks: the first one runs in the thread of the test.
    """

    def __init__(
        self,
        execution: ExecutionConfig,
        num_ranks: int,
        make: MakeWorker,
        group: type[RankGroup] = RankGroup,
    ) -> None:
        make_group = group
        self._pool = ThreadPoolExecutor(num_ranks)
        with tempfile.TemporaryDirectory() as folder:

            def start(rank: int) -> ThreadRank:
                group = make_group(Shard(rank, num_ranks), Path(folder, "ranks"))
                model = replace(execution.model, shard=group.shard)
                runners = make_runners(replace(execution, model=model), ranks=group)
                return ThreadRank(group, runners, make(runners))

            self.ranks = self.on_all(start)
        first, *others = self.ranks
        self._queues: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in others]
        self._following = [
            self._pool.submit(self._follow, rank, queue)
            for rank, queue in zip(others, self._queues, strict=True)
        ]
        self.worker = BroadcastWorker(first.worker, self._send)
        own = make_resources(first.runners)
        self.resources: ModelResources = resources_of_ranks(own, first.group, self._send)
        self.num_frames = 0

    def on_all(self, work: Callable[[int], T]) -> list[T]:
        """Runs work on all ranks at once, before they follow the first one."""
        num_ranks = self._pool._max_workers
        futures: list[Future[T]] = [self._pool.submit(work, rank) for rank in range(num_ranks)]
        return [future.result(60) for future in futures]

    def settle(self) -> None:
        """Returns when the others have done all that the first one has; raises what they raised."""
        for queue in self._queues:
            queue.put(None)
        for future in self._following:
            assert isinstance(future.exception(60), _End), future.exception()
        self._pool.shutdown()

    def _send(self, frame: bytes) -> None:
        self.num_frames += 1
        for queue in self._queues:
            queue.put(frame)

    @staticmethod
    def _follow(rank: ThreadRank, queue: SimpleQueue[bytes | None]) -> None:
        def receive() -> bytes:
            frame = queue.get()
            if frame is None:
                raise _End
            return frame

        threading.current_thread().name = f"rank {rank.group.shard.rank}"
        follow(rank.worker, receive, calls_of(rank.runners, rank.group))
