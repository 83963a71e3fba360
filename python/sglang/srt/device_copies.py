"""Asynchronous copies between host and device: the host goes on while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def to_device(
    values: Sequence[Any] | np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of host values on a device. From pinned memory, so the host goes on at once.

    Thousands of values are best given as an array, which is copied as a whole: on the CPU not even
    that, so it must not be changed afterwards.
    """
    device = torch.device(device)
    is_pinned = device.type != "cpu"
    if isinstance(values, np.ndarray):
        host = torch.as_tensor(values, dtype=dtype)
        host = host.pin_memory() if is_pinned else host
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=is_pinned)
    return host.to(device, non_blocking=True) if is_pinned else host


def overwrite(target: torch.Tensor, values: Sequence[Any]) -> None:
    """Writes one host value per element into an existing tensor; the host goes on at once."""
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(host.view_as(target), non_blocking=True)


def when_computed(tensor: torch.Tensor) -> Callable[[], bool]:
    """Says, whenever it is called, whether what has been launched to compute a tensor is done."""
    if not tensor.is_cuda:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


class HostCopy:
    """Copies of tensors to the host, which begin when this is made; those on the host already are
    not copied. Of several views of one storage the whole storage is copied, once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = list(tensors)
        copies: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                self._host[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
            elif tensor.device.type != "cpu":
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in copies:
                    whole = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                    host = torch.empty(whole.shape, dtype=tensor.dtype, pin_memory=True)
                    copies[storage.data_ptr()] = host.copy_(whole, non_blocking=True)
                self._host[index] = copies[storage.data_ptr()].as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )
        if copies:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Tells whether nothing had to be copied: all tensors are on the host."""
        return self._event is None

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Returns when the copies are there."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[torch.Tensor]:
        """Waits for the copies; returns them in order."""
        self.wait()
        return self._host
