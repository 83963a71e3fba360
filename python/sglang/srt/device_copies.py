"""Copies between host and device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of host values on a device. From pinned memory, so the host goes on at once."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host since this was made; some may be there already."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = list(tensors)
        for index, tensor in enumerate(tensors):
            if tensor.device.type != "cpu":
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host[index] = host.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
        if self._event is not None:
            self._event.record()

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[torch.Tensor]:
        """Waits for the copies; returns them in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
