"""The ranks of one model: what they compute together, and what they agree on.

Every rank calls the same methods in the same order. Tensors of a GPU go through NCCL, those of a
CPU and all that is agreed on through gloo, over this machine's loopback address.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from sglang.srt.distributed.one_shot import Exchange, OneShotSums
from sglang.srt.shard import Shard

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ONE_SHOT_TIMEOUT = timedelta(minutes=1)  # to connect memory that was made; NCCL does without
TIMEOUT = timedelta(days=1)  # the launcher ends all ranks when one is gone or stopped

NCCL_ENVIRON = {
    "NCCL_NVLS_ENABLE": "0",  # no multicast of NVLink
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # nor here
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # each rank calls its own GPU the first
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the launcher watches the ranks
}
# Bytes of a rank in messages that connect GPUs in every way that steps will use.
FIRST_MESSAGES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)


class RankLostError(RuntimeError):
    """Another rank is gone, or did something else at the same time; no step can follow."""


class RankGroup:
    """This rank and the others. Implements `Collectives`.

    Args:
        shard: this rank's place.
        meeting_point: a file that is not there yet, in a private folder, the same for all ranks.

    Raises:
        RuntimeError: if the ranks do not find each other.
        RankLostError: by every method.
    """

    def __init__(self, shard: Shard, meeting_point: Path) -> None:
        self.shard = shard
        self._meeting_point = meeting_point
        self._on_gpus: Any = None
        self.one_shot: OneShotSums | None = None
        gloo: Any = dist.ProcessGroupGloo  # torch does not say what types it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        store = dist.FileStore(str(meeting_point), shard.num_ranks)
        self._group = gloo(store, shard.rank, shard.num_ranks, options)
        self._is_alone = False
        self._group.barrier().wait()
        if shard.rank == 0:
            meeting_point.unlink(missing_ok=True)

    def connect_gpus(
        self,
        device: str,
        dtype: torch.dtype,
        exchange: Exchange | None = None,
        room: Any = None,
    ) -> None:
        """Connects the GPUs of all ranks, and sends first messages of the type that steps send:
        later there may be little memory for what that takes, and a CUDA graph can contain only what
        is connected.

        Args:
            device: this rank's.
            exchange: kernels that sum messages, if the GPUs can; None: NCCL sums all.
            room: of these kernels, which says what they sum; NCCL sums the rest.

        Raises:
            ValueError: if this torch cannot.
            RuntimeError: if NCCL cannot; its text says why.
        """
        if not dist.is_nccl_available():
            raise ValueError("--tp-size on GPUs needs a torch that is built with NCCL.")
        os.environ.update(NCCL_ENVIRON)  # read when the first group is made
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = TIMEOUT
        options.global_ranks_in_group = [*range(self.shard.num_ranks)]
        options.group_name = "ranks"
        meeting_point = self._meeting_point.with_suffix(".gpus")
        store = dist.FileStore(str(meeting_point), self.shard.num_ranks)
        self._on_gpus = nccl(store, self.shard.rank, self.shard.num_ranks, options)
        for message in _first_messages(device, dtype):
            self.join(self.sum(message), message.shape[1] * self.shard.num_ranks)
        if exchange is not None:
            apart = dist.PrefixStore("one shot", store)
            self._connect_one_shot(exchange, apart, device, room)
            for message in _first_messages(device, dtype):
                self.sum(message)
        torch.cuda.synchronize()
        self._group.barrier().wait()
        if self.shard.rank == 0:
            meeting_point.unlink(missing_ok=True)

    def _connect_one_shot(
        self, kernel: Exchange, store: dist.Store, device: str, room: Any
    ) -> None:
        """Has messages summed in one exchange, on all ranks or on none."""
        store.set_timeout(ONE_SHOT_TIMEOUT)
        made = list[OneShotSums]()
        problem = self._first_problem(
            lambda: made.append(OneShotSums(kernel, self.shard, self._group, store, device, room))
        )
        # No rank waits in there for one that has failed before.
        problem = problem or self._first_problem(lambda: made[0].connect())
        if not problem:
            self.one_shot = made[0]
        elif self.shard.rank == 0:
            logger.warning("NCCL sums all messages, since: %s", problem)

    def _first_problem(self, run: Callable[[], None]) -> str:
        """Runs something on all ranks, and returns on all what was wrong on the first one of those
        where it failed; "": nothing."""
        problem = ""
        try:
            run()
        except RuntimeError as error:
            problem = (str(error).strip() or repr(error)).splitlines()[0]
        return next(filter(None, self.texts(problem)), "")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this block this rank computes without the others, and its results mean nothing: for
        work that compiles kernels or takes memory, and may fail on one rank alone."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`; in place."""
        if self._is_alone or not x.numel():
            return x
        x = x.contiguous()
        self.all_reduce(x)
        return x

    def join(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """See `Collectives`."""
        if not len(x):  # no row is read, on any rank
            return x.new_empty((0, width))
        num_ranks = self.shard.num_ranks
        most = -(-width // num_ranks)
        padded = torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous()
        parts = padded.new_zeros((num_ranks * len(x), most))
        if not self._is_alone:
            self.all_gather(parts, padded)
        rows = parts.view(num_ranks, len(x), most).transpose(0, 1).reshape(len(x), -1)
        return rows[:, :width].contiguous()

    def all_reduce(self, x: torch.Tensor) -> None:
        """Overwrites x, of the same shape on all ranks, with the sum of all. On a GPU it is queued
        in the current stream, like a kernel."""
        if self.one_shot is not None and self.one_shot.takes(x):
            self.one_shot.all_reduce(x)
            return
        options = AllreduceOptions()
        options.asyncOp = False
        _wait(self._group_of(x).allreduce, [x], options)

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        """Writes all ranks' x one after the other to `parts`; otherwise as `all_reduce`."""
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._group_of(x)._allgather_base, parts, x, options)

    def _group_of(self, x: torch.Tensor) -> Any:
        if not x.is_cuda:
            return self._group
        assert self._on_gpus is not None, "See `connect_gpus`."
        return self._on_gpus

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(self._numbers(number))

    def first_of(self, number: float) -> float:
        """The first rank's number: of what each measures, all go by that."""
        return float(self.tensor_from_first(torch.tensor([number], dtype=torch.float64)))

    def from_first(self, data: bytes) -> bytes:
        """Gives the first rank's data to all; that of the others does not count."""
        size = self._numbers(len(data))[0]
        box = torch.zeros(size, dtype=torch.uint8)
        if self.shard.rank == 0 and data:
            box = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.tensor_from_first(box).numpy().tobytes()

    def tensor_from_first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, on the host; the others give one of its shape and type, which is
        overwritten."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if values.numel():
            _wait(self._group.broadcast, [values.view(-1).view(torch.uint8)], options)
        return values

    def texts(self, text: str) -> list[str]:
        """All ranks' texts."""
        data = text.encode()
        sizes = self._numbers(len(data))
        row = torch.zeros((1, max(sizes)), dtype=torch.uint8)
        row[0, : len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        rows = torch.zeros((len(sizes), row.shape[1]), dtype=torch.uint8)
        if row.numel():
            _wait(self._group._allgather_base, rows, row)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def _numbers(self, number: int) -> list[int]:
        found = torch.zeros(self.shard.num_ranks, dtype=torch.int64)
        _wait(self._group._allgather_base, found, torch.tensor([number]))
        return [int(each) for each in found]


def _first_messages(device: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for num_bytes in FIRST_MESSAGES:
        yield torch.zeros((1, num_bytes // dtype.itemsize), dtype=dtype, device=device)


def _wait(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        work = collective(*arguments)
        if work is not None:  # None: it is queued in a GPU's current stream
            work.wait()
    except RuntimeError as error:
        raise RankLostError(str(error).splitlines()[0]) from error
