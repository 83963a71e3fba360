"""Weights that a trainer broadcasts over torch.distributed."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from threading import Lock, Thread
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sglang.srt.weight_sync.weight_reader import WeightUpdateError, first_line

logger = logging.getLogger(__name__)
T = TypeVar("T")

TRAINER_RANK = 0
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # to the device that it receives on
DTYPES = ("float32", "bfloat16", "float16", "int64")  # names in torch of what may be sent
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integer of each size in bytes
RETRY_INTERVAL_S = 0.1
# A watchdog of NCCL ends the process when the time-out of the group is over: ours comes first.
NCCL_MARGIN_S = 600.0
JOIN_AGAIN = "leave the group and join it again"
LEFT = "the group was left"
SPARE_BYTES = 1 << 20
# What torch raises of a group: its own errors are RuntimeErrors, a name in use is a ValueError, and
# the last three come from its private helper, should that change.
FAILURES = (RuntimeError, ValueError, OSError, AssertionError, TypeError, AttributeError)


@dataclass(frozen=True)
class TensorSpec:
    """The tensors that the trainer broadcasts next.

    Attributes:
        name: the weight's name in a checkpoint.
        dtype: one of `DTYPES`, with or without `torch.` in front.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightGroup:
    """A process group with a trainer (rank 0) and its receivers, beside the default group, if any.

    The trainer makes the group as RL trainers do: a TCP store, prefixed with the group's name, and
    torch's helper for process groups. One thread at a time may call this; `close` may be called
    from any, at any time.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, backend: str, timeout_s: float) -> None:
        """Takes over `group`; use `join`."""
        self._group: dist.ProcessGroup | None = group
        self._name, self._device, self._timeout_s = name, BACKENDS[backend], timeout_s
        # gloo ends the process if more comes than fits, so there is spare room. Not with several
        # receivers, which hand on what they receive.
        self._has_spare = backend == "gloo" and group.size() == 2
        self._problem: str | None = None  # why what comes next may not be what is expected
        self._awaited: Future[torch.Tensor] | None = None
        self._lock = Lock()  # of group and awaited, so that `close` misses no tensor

    @classmethod
    def join(
        cls,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> WeightGroup:
        """Waits for the trainer and all other receivers.

        The arguments must be in the ranges of `control/bodies.py`, which checks what clients send.

        Args:
            rank: from 1: rank 0 is the trainer.
            backend: one of BACKENDS.
            timeout_s: for joining, and later for each tensor.

        Raises:
            WeightUpdateError: if the group does not come about in time.
        """
        if backend == "nccl" and not dist.is_nccl_available():
            raise WeightUpdateError("backend nccl needs a torch with CUDA; use gloo.")
        where = f"{master_address!r}, port {master_port},"

        def make_group() -> WeightGroup:
            _await_listener(master_address, master_port, timeout_s)
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(master_address, master_port, world_size, False, timeout)
            group = _new_group(store, rank, world_size, group_name, backend, timeout_s)
            return cls(group, group_name, backend, timeout_s)

        try:
            return _within(timeout_s, make_group, WeightGroup.close)
        except FAILURES as error:
            raise WeightUpdateError(
                f"Group {group_name!r} at {where} cannot be joined as rank {rank} of {world_size}:"
                f" {_reason(error, timeout_s)}; start the trainer's side, with the same name."
            ) from None

    def receive(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each spec, in order, as the trainer broadcasts them.

        The specs must say what is sent, in types of DTYPES and the shapes of `control/bodies.py`.
        More or less of it is an error, except that gloo ends the whole process if a tensor has more
        than twice its announced bytes plus 1 MiB (with several receivers: more than its announced
        bytes). Stopping half-way breaks the group.

        Raises:
            WeightUpdateError: at once if the group is closed or broken; later if a tensor does not
                come, which breaks the group, or if the group is closed.
        """
        dtypes = [getattr(torch, spec.dtype.removeprefix("torch.")) for spec in specs]
        self._check_usable()
        return self._receive_all(list(specs), dtypes)

    def close(self) -> None:
        """Leaves the group; the trainer's later broadcasts fail, and so does a `receive` that
        waits. A second call does nothing."""
        with self._lock:
            group, self._group = self._group, None
            awaited = self._awaited
        if group is None:
            return
        if awaited is not None:
            with suppress(InvalidStateError):  # the tensor has come
                awaited.set_exception(RuntimeError(LEFT))
        try:
            if self._problem is not None:
                group.abort()
            dist.destroy_process_group(group)
        except FAILURES as error:
            logger.warning("Group %r did not close cleanly: %s", self._name, first_line(error))

    def _receive_all(
        self, specs: list[TensorSpec], dtypes: list[torch.dtype]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_usable()
        self._problem = "weights were left in it"
        for num_left, spec, dtype in zip(range(len(specs))[::-1], specs, dtypes, strict=True):
            tensor = self._receive_one(spec, dtype)
            if num_left == 0:
                self._problem = None
            yield spec.name, tensor

    def _receive_one(self, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
        awaited: Future[torch.Tensor] = Future()
        with self._lock:
            group, self._awaited = self._group, awaited
        if group is None:
            raise self._not_received(spec, LEFT)
        num_values = prod(spec.shape)
        num_spare = num_values + SPARE_BYTES // dtype.itemsize if self._has_spare else 0

        def broadcast() -> torch.Tensor:
            values = torch.empty(num_values + num_spare, dtype=dtype, device=self._device)
            # All bits set is a NaN that no arithmetic makes, so it shows where nothing came.
            bits = values.view(BITS[dtype.itemsize])
            last, beyond = bits[max(num_values - 1, 0) : num_values], bits[num_values:][:1]
            last.fill_(-1)
            beyond.fill_(-1)
            options = distributed_c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = TRAINER_RANK, 0
            group.broadcast([values], options).wait()
            if (last == -1).any():
                raise RuntimeError("the trainer sent fewer values than announced")
            if (beyond != -1).any():
                raise RuntimeError("the trainer sent more values than announced")
            return values[:num_values].view(spec.shape)

        try:
            return _within(self._timeout_s, broadcast, future=awaited)
        except FAILURES as error:
            self._problem = _reason(error, self._timeout_s)
            raise self._not_received(spec, self._problem) from None
        finally:
            self._awaited = None

    def _not_received(self, spec: TensorSpec, reason: str) -> WeightUpdateError:
        remedy = "join it again" if self._group is None else JOIN_AGAIN
        return WeightUpdateError(
            f"Weight {spec.name!r} did not come through group {self._name!r}: {reason}; {remedy}."
        )

    def _check_usable(self) -> None:
        if self._group is None:
            raise WeightUpdateError(f"Group {self._name!r} is closed; join it first.")
        if self._problem is not None:
            raise WeightUpdateError(
                f"Group {self._name!r} is broken: {self._problem}; {JOIN_AGAIN}."
            )


def _new_group(
    store: dist.Store, rank: int, world_size: int, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """A group that is registered so that `destroy_process_group` knows it. torch has no public
    way to make one that is no part of the default group."""
    margin_s = NCCL_MARGIN_S if backend == "nccl" else 0.0
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        dist.PrefixStore(name, store),
        group_name=cast("distributed_c10d.GroupName", name),
        timeout=timedelta(seconds=timeout_s + margin_s),
    )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def _await_listener(address: str, port: int, timeout_s: float) -> None:
    """Returns when something listens: torch would log each attempt at length, and wait longer."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            left = max(end - time.monotonic(), RETRY_INTERVAL_S)
            socket.create_connection((address, port), timeout=left).close()
            return
        except OSError:
            if time.monotonic() + RETRY_INTERVAL_S > end:
                raise
        time.sleep(RETRY_INTERVAL_S)


def _within(
    timeout_s: float,
    work: Callable[[], T],
    drop: Callable[[T], None] | None = None,
    future: Future[T] | None = None,
) -> T:
    """The result of `work`, or TimeoutError; not every call of torch keeps its own time-out.

    Args:
        drop: is given a result that came too late.
        future: gets the result; whoever gives it an exception first ends the wait.
    """
    future = Future() if future is None else future

    def run() -> None:
        try:
            result = work()
        except FAILURES as error:
            with suppress(InvalidStateError):  # no one waits any more
                future.set_exception(error)
            return
        try:
            future.set_result(result)
        except InvalidStateError:
            if drop is not None:
                drop(result)

    Thread(target=run, daemon=True, name="weight-group").start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.cancel():
            raise
        return future.result()


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {timeout_s:g} s"
    return first_line(error)
