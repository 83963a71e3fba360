"""Sums of small messages of GPUs in one exchange, over memory that all GPUs of the ranks read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from sglang.srt.shard import Shard

ONE_SHOT_BYTES = 1 << 19  # of the largest message; no run on several GPUs has decided it yet
NAME: Any = "one shot"  # a `GroupName`
DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds
ALIGNMENT = 16  # bytes that a thread of the kernel reads and writes at once


class OneShotSums:
    """Torch's one-shot all-reduce: every rank reads the message of each, and adds them up in the
    order of ranks, so the sum has the same bits everywhere. Calls must follow each other in one
    stream; a CUDA graph can contain them. One per process.

    The message is copied to the shared memory first, by a kernel of its own: torch's kernel that
    also copies lets another rank read before all threads of a block have written.

    Args:
        gloo: a group of the same ranks. Torch finds ranks by a named group with any backend.
        store: empty, and the same for all ranks.
        num_bytes: of the largest message, the same on all ranks.

    Raises:
        RuntimeError: if this rank lacks what it takes. It has waited for no other one.
    """

    def __init__(
        self, shard: Shard, gloo: Any, store: dist.Store, device: str, num_bytes: int
    ) -> None:
        self._group: Any = dist.ProcessGroup(store, shard.rank, shard.num_ranks)
        backend = dist.ProcessGroup.BackendType.GLOO
        self._group._register_backend(torch.device("cpu"), backend, gloo)
        self._group._set_group_name(NAME)
        _register_process_group(NAME, self._group)  # keeps no reference
        place = torch.empty(0, device=device).device  # with its index
        self._shared = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, place)

    def connect(self) -> None:
        """Lets the ranks read each other's memory, once all have made theirs; waits for them as
        long as the store waits.

        Raises:
            RuntimeError: if the GPUs cannot, or another rank does not come.
        """
        _SymmetricMemory.rendezvous(self._shared, NAME)

    def takes(self, x: torch.Tensor) -> bool:
        """Tells whether it can sum x, whose shape, type and place in memory are those of all."""
        return (
            x.device == self._shared.device
            and x.dtype in DTYPES
            and x.nbytes <= self._shared.nbytes
            and x.nbytes % ALIGNMENT == 0
            and x.storage_offset() * x.element_size() % ALIGNMENT == 0
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        """Overwrites x, which is contiguous, with the sum of all ranks'."""
        flat = x.view(-1)
        shared = self._shared[: x.nbytes].view(x.dtype)
        shared.copy_(flat)
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", NAME, flat)
