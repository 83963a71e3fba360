"""A table on the device of where the KV of all layers lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVAddresses:
    """The tensors of every layer of one or more pools behind one page table, for `move_kept_kv`.

    Attributes:
        tensors: each [num_slots, ...], contiguous, on one device; shapes and dtypes may differ.
        table: [L, 3] int64 on that device; a tensor's address, bytes of a slot, and slots
            (`KVTensor` in include/sgl_kernel/move_kept_kv.cuh).
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError for tensors that the table cannot describe."""
        if not tensors:
            raise ValueError("KVAddresses needs at least one tensor; pass those of all layers")
        for tensor in tensors:
            if tensor.dim() < 2 or not tensor.is_contiguous():
                raise ValueError(
                    "KV must be contiguous [num_slots, ...] tensors; pass those of a slot's K and V"
                    f" together, not views of them (shape {list(tensor.shape)})"
                )
            if tensor.device != tensors[0].device:
                raise ValueError(
                    f"KV is on {tensors[0].device} and {tensor.device}; make one table per device"
                )
        self.tensors = tuple(tensors)
        self.table = torch.empty(len(tensors), 3, dtype=torch.int64, device=tensors[0].device)
        self.refresh()

    def refresh(self) -> None:
        """Reads the addresses again, into the same table: captured graphs see them. To be called
        after the tensors' memory was given back and taken again; it may wait for the device."""
        entries = [
            (tensor.data_ptr(), tensor[0].numel() * tensor.element_size(), tensor.shape[0])
            for tensor in self.tensors
        ]
        self.table.copy_(torch.tensor(entries, dtype=torch.int64))
