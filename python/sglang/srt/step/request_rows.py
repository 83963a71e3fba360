"""What the device knows of each running request, so that a step can start before the host has read
the one before it."""

from __future__ import annotations

import msgspec
import torch

from sgl_kernel.sampling_rows import FLOATS, SamplingRows
from sglang.srt.device_copies import to_device
from sglang.srt.layers.logit_adjustments import LogitAdjustments
from sglang.srt.step.worker import NewRow


class RequestRows:
    """One entry per row of the request-to-token table.

    Attributes:
        committed: [N] int64; the watermark: tokens with KV.
        pending: [N, max_pending] int64; tokens without KV that the next decode step feeds.
        pending_lens: [N] int64; how many, at least 1.
    """

    def __init__(self, num_rows: int, max_pending: int, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.pending = torch.zeros((num_rows, max_pending), dtype=torch.int64, device=device)
        # Of each kind an even number: kernels get addresses that are multiples of 16 bytes.
        shape = (4, num_rows + num_rows % 2)
        self._integers = torch.ones(shape, dtype=torch.int64, device=device)
        self.committed, self.pending_lens, self._seeds, self._top_k = self._integers[:, :num_rows]
        # The fields of SamplingParams that are floats of SamplingRows.
        self._floats = torch.zeros((len(FLOATS), num_rows), dtype=torch.float32, device=device)
        self.adjustments = LogitAdjustments(num_rows, vocab_size, device)

    def initialize(self, new_rows: list[NewRow]) -> None:
        """Sets the state of requests that have just got a row."""
        if not new_rows:
            return
        integers, floats = [], []
        for new in new_rows:
            self.adjustments.initialize(new.row, new.adjustments)
            params = new.params
            if params.is_greedy:
                params = msgspec.structs.replace(params, temperature=0.0)
            top_k = self._vocab_size if params.top_k == -1 else params.top_k
            integers.append((new.row, new.num_committed, 1, new.seed, top_k))
            floats.append([getattr(params, name) for name in FLOATS])
        values = to_device(integers, self._device, torch.int64)
        rows = values[:, 0]
        self._integers[:, rows] = values[:, 1:].T
        self._floats[:, rows] = to_device(floats, self._device, torch.float32).T

    def sampling(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """Parameters of `rows` [S], which draw the tokens at `positions` [S]."""
        floats = dict(zip(FLOATS, self._floats[:, rows], strict=True))
        top_k, seeds = self._top_k[rows], self._seeds[rows]
        return SamplingRows(top_k=top_k, seeds=seeds, positions=positions, **floats)
