"""Several ranks of a model in the threads of one process: their frames go through queues, their
sums through gloo, as between processes.

    TEST_RANKS=2 pytest test/unit/speculative/test_eagle.py

runs what steps real models there over ranks. After each check all ranks must have had the same
device rows, drafts among them, after every step. The models are others there, so that a few tests
see fewer drafts of a kind (right, wrong, on another branch) than they ask for, and fail by that.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from recorded_graphs import graph_being_recorded
from sglang.srt.control.control import ModelResources
from sglang.srt.distributed.group import RankGroup
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.rank_calls import calls_of, resources_of_ranks
from sglang.srt.processes.resources import make_resources
from sglang.srt.shard import Shard
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import Worker
from sglang.srt.workers.broadcast_worker import BroadcastWorker, follow
from sglang.srt.workers.tp_worker import TpModelWorker

NUM_RANKS = int(os.environ.get("TEST_RANKS", "1"))  # of what `runners_of` makes
WAIT_S, END_S = 60.0, 5.0
EQUAL_ROWS = ("tokens", "num_tokens", "committed", "pending_lens")

T = TypeVar("T")
MakeWorker = Callable[[RunnerGroup], TpModelWorker]
Frames = SimpleQueue[bytes | threading.Event | None]  # an event: it is reached; None: the end


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
    """Ranks that hold a model together, and each the models of a drafter. They step once they
    `serve`.

    Args:
        execution: of the whole model.
        others: of the drafter's models.
        group: of each rank.

    Attributes:
        runners: of each rank.
        ranks: the first one runs in the thread of the test.
        worker: steps all of them.
        resources: what control calls change of all of them.
    """

    def __init__(
        self,
        execution: ExecutionConfig,
        num_ranks: int,
        others: Sequence[ExecutionConfig] = (),
        group: type[RankGroup] = RankGroup,
    ) -> None:
        self._num_ranks, make_group = num_ranks, group
        with tempfile.TemporaryDirectory() as folder:

            def start(rank: int) -> tuple[RankGroup, RunnerGroup]:
                group = make_group(Shard(rank, num_ranks), Path(folder, "ranks"))
                model = replace(execution.model, shard=group.shard)
                return group, make_runners(replace(execution, model=model), *others, ranks=group)

            self._groups = self.on_all(start)
        self.runners = [runners for _, runners in self._groups]
        self.num_frames = 0

    def serve(self, make: MakeWorker) -> None:
        """Makes each rank's worker, and has the others follow the first one."""
        workers = self.on_all(lambda rank: make(self.runners[rank]))
        self.ranks = [
            ThreadRank(group, runners, worker)
            for (group, runners), worker in zip(self._groups, workers, strict=True)
        ]
        first, *others = self.ranks
        self._queues: list[Frames] = [SimpleQueue() for _ in others]
        self._following = [_started(*each) for each in zip(others, self._queues, strict=True)]
        weakref.finalize(self, _end, self._queues)
        _serving.add(self)
        self.worker = BroadcastWorker(first.worker, self._send)
        own = make_resources(first.runners)
        self.resources: ModelResources = resources_of_ranks(own, first.group, self._send)

    def on_all(self, work: Callable[[int], T]) -> list[T]:
        """Runs work on all ranks at once, before they follow the first one."""
        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [pool.submit(work, rank) for rank in range(self._num_ranks)]
            return [future.result(WAIT_S) for future in futures]

    def meet(self) -> None:
        """Returns when the others have done all that the first one has, with equal rows, which no
        token was sent for; raises what they raised."""
        for queue, following in zip(self._queues, self._following, strict=True):
            queue.put(reached := threading.Event())
            while not reached.wait(0.01):
                assert not following.done(), following.exception()
        first, *others = (rank.worker._state for rank in self.ranks)
        for rows in others:
            for name in EQUAL_ROWS:
                assert vars(rows)[name].equal(vars(first)[name]), name

    def settle(self) -> None:
        """Ends the others after `meet`."""
        self.meet()
        self.end()
        for future in self._following:
            assert isinstance(future.exception(WAIT_S), _End), future.exception()

    def end(self) -> None:
        """Ends the others, unless they wait for the first one in the middle of a step."""
        _end(self._queues)
        for future in self._following:
            with suppress(TimeoutError):
                future.exception(END_S)

    def _send(self, frame: bytes) -> None:
        self.num_frames += 1
        for queue in self._queues:
            queue.put(frame)


_serving: weakref.WeakSet[ThreadRanks] = weakref.WeakSet()


def end_all_ranks() -> None:
    """Ends what a test has left: their threads would free memory later, when others count it."""
    for ranks in [*_serving]:
        ranks.end()
    _serving.clear()


def _end(queues: list[Frames]) -> None:
    for queue in queues:
        queue.put(None)


def _started(rank: ThreadRank, queue: Frames) -> Future[None]:
    """Follows in a thread that keeps no process from its end."""

    def receive() -> bytes:
        while isinstance(frame := queue.get(), threading.Event):
            frame.set()
        if frame is None:
            raise _End
        return frame

    def run() -> None:
        try:
            follow(rank.worker, receive, calls_of(rank.runners, rank.group))
        except BaseException as error:  # noqa: BLE001 - whoever meets it raises it
            future.set_exception(error)
            if not isinstance(error, _End):
                del rank.group._group  # the others lose this rank, and wait for it no longer

    future: Future[None] = Future()
    threading.Thread(target=run, daemon=True, name=f"rank {rank.group.shard.rank}").start()
    return future


class RunnersOfRanks(RunnerGroup):
    """The runners of the first rank, for `put_to_work`."""

    def __init__(self, ranks: ThreadRanks) -> None:
        first = ranks.runners[0]
        super().__init__(first.runners, first._ranks)
        self.ranks = ranks


def runners_of(
    execution: ExecutionConfig, *others: ExecutionConfig, num_ranks: int = NUM_RANKS
) -> RunnerGroup:
    """Runners of a model and of a drafter's, for `put_to_work`."""
    if num_ranks == 1:
        return make_runners(execution, *others)
    return RunnersOfRanks(ThreadRanks(execution, num_ranks, others))


class AtWork(NamedTuple):
    """Holds what runs the steps of models.

    Attributes:
        first: the worker of the first rank, or of all.
        steps: for the scheduler.
        resources: what control calls change.
        meet: see `ThreadRanks.meet`.
    """

    first: TpModelWorker
    steps: Worker
    resources: ModelResources
    meet: Callable[[], None]


def put_to_work(group: RunnerGroup, make: MakeWorker) -> AtWork:
    """Makes the worker of all ranks."""
    if not isinstance(group, RunnersOfRanks):
        worker = make(group)
        return AtWork(worker, worker, make_resources(group), lambda: None)
    ranks = group.ranks
    ranks.serve(lambda runners: make(group if runners is ranks.runners[0] else runners))
    return AtWork(ranks.ranks[0].worker, ranks.worker, ranks.resources, ranks.meet)


class EqualSteps:
    """Looks whether all ranks have the same device rows after every step; for `on_step` of their
    workers.

    Args:
        tell: is told of the first rank's steps.
        compares: there are several ranks.
        scramblers: change each rank's rows alike.

    Attributes:
        first: rows of the first rank; to be set before the first step.
    """

    def __init__(
        self,
        tell: Callable[[ComputedStep], object] | None,
        compares: bool,
        scramblers: Sequence[Callable[[ComputedStep], None]] = (),
    ) -> None:
        self._tell = tell
        self._compares = compares
        self._scramblers = scramblers
        self._notes: dict[int, list[int]] = {}
        self.first: RequestRows

    def __call__(self, step: ComputedStep) -> object:
        for scramble in self._scramblers:
            scramble(step)
        state = step.state
        if self._compares:
            self._notes.setdefault(id(state), []).append(_digest(state))
        return self._tell(step) if self._tell and state is self.first else None

    def check(self) -> None:
        """After `ThreadRanks.meet`."""
        first, *others = self._notes.values() or [[]]
        assert all(notes == first for notes in others), "The ranks' rows differ."
        self._notes.clear()


def _digest(state: RequestRows) -> int:
    tensors = [vars(state)[name] for name in EQUAL_ROWS]
    tensors += [] if state.confidence is None else [state.confidence]
    tensors += [] if state.trees is None else [state.trees.parents, state.trees.ancestors]
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))
