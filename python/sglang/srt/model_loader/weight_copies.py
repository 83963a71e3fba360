"""Copies of weights from the host to their places in a model, and comparisons."""

from __future__ import annotations

import torch

CHUNK_BYTES = 1 << 26


def have_equal_values(
    one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES
) -> bool:
    """Tells whether two weights, on any devices, are the same in shape and, as `dtype`, in values.
    Takes a few chunks of host memory."""
    if one is other or one.shape != other.shape:
        return one is other
    chunk = max(1, chunk_bytes * len(one) // max(1, one.numel() * dtype.itemsize))
    pieces = zip(one.split(chunk), other.split(chunk), strict=True)
    return all(
        torch.equal(first.to("cpu", dtype), second.to("cpu", dtype)) for first, second in pieces
    )


class WeightCopies:
    """Copies tensors of a checkpoint to places on one device.

    To an accelerator they go through two pinned buffers in turn: one is filled while the other is
    copied. So a copy takes two chunks of host memory, whatever the size of a weight, and nothing is
    left on the device beside the weights. Values become the place's type on their way.

    Args:
        device: where the places are.
        chunk_bytes: size of a buffer.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._is_direct = device.type == "cpu"
        pins = not self._is_direct
        self._buffers = [
            torch.empty(0 if self._is_direct else chunk_bytes, dtype=torch.uint8, pin_memory=pins)
            for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if pins else []

    def copy(self, place: torch.Tensor, weight: torch.Tensor) -> None:
        """Fills `place` with `weight` of the same shape, in any type, of the host or of its own
        device."""
        if self._is_direct or weight.device == place.device:
            place.copy_(weight)
            return
        chunk = self._buffers[0].numel() // place.itemsize
        pieces = zip(place.view(-1).split(chunk), weight.reshape(-1).split(chunk), strict=True)
        for target, source in pieces:
            self._buffers.reverse()
            self._copied.reverse()
            self._copied[0].synchronize()
            staged = self._buffers[0][: target.nbytes].view(target.dtype)
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            self._copied[0].record()

    def finish(self) -> None:
        """Returns when all places are filled."""
        for copied in self._copied:
            copied.synchronize()
