"""Sums of messages of GPUs in one exchange, over memory that all GPUs of the ranks write."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from sglang.srt.shard import Shard


class Exchange(Protocol):
    """The kernels, see `layers/ops/rank_exchange.py`."""

    def takes(self, x: torch.Tensor, room: Any) -> bool: ...

    def exchange(
        self, x: torch.Tensor, epochs: torch.Tensor, buffers: torch.Tensor, room: Any, rank: int
    ) -> None: ...


class OneShotSums:
    """Sums whose bits are the same on all ranks. Calls must follow each other in one stream; a CUDA
    graph can contain them. One per room in a process.

    Args:
        gloo: a group of the same ranks. Torch finds ranks by a named group with any backend.
        store: empty, and the same for all ranks.
        room: of the kernels, the same on all ranks.

    Raises:
        RuntimeError: if this rank lacks what it takes. It has waited for no other one.
    """

    def __init__(
        self,
        kernel: Exchange,
        shard: Shard,
        gloo: Any,
        store: dist.Store,
        device: str,
        room: Any,
    ) -> None:
        self._kernel, self._shard, self.room = kernel, shard, room
        self._group: Any = dist.ProcessGroup(store, shard.rank, shard.num_ranks)
        backend = dist.ProcessGroup.BackendType.GLOO
        self._group._register_backend(torch.device("cpu"), backend, gloo)
        self._name = cast(Any, f"one shot, {room}")  # a `GroupName`
        self._group._set_group_name(self._name)
        _register_process_group(self._name, self._group)  # keeps no reference
        place = torch.empty(0, device=device).device  # with its index
        size = (room.num_bytes,)
        self._buffer = _SymmetricMemory.empty_strided_p2p(size, (1,), torch.uint8, place)
        self._buffer.zero_()
        self._epochs = torch.zeros(room.num_epochs, dtype=torch.int32, device=place)
        self._buffers = torch.zeros(shard.num_ranks, dtype=torch.int64, device=place)
        if place.type == "cuda":
            torch.cuda.synchronize(place)  # others may write once they know where

    def connect(self) -> None:
        """Lets the ranks write into each other's memory, once all have made theirs; waits for them
        as long as the store waits.

        Raises:
            RuntimeError: if the GPUs cannot, or another rank does not come.
        """
        # Kept as long as it is written.
        self._memory = _SymmetricMemory.rendezvous(self._buffer, self._name)
        addresses = self._memory.buffer_ptrs
        offset = self._buffer.data_ptr() - addresses[self._shard.rank]
        self._buffers.copy_(torch.tensor([address + offset for address in addresses]))

    def takes(self, x: torch.Tensor) -> bool:
        """Tells whether it can sum x, whose shape, type and place in memory are those of all."""
        return x.device == self._buffer.device and self._kernel.takes(x, self.room)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Overwrites x, which is contiguous, with the sum of all ranks'."""
        self._kernel.exchange(x, self._epochs, self._buffers, self.room, self._shard.rank)
