"""Packed steps: the device decides how many rows each request feeds. Here in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.row_division import TorchRowDivision, WantedRows
from sglang.srt.step.step_ops import (
    NUM_PROMPT,
    NUM_READ,
    Q_LEN,
    Q_START,
    READ_START,
    ROW,
)


class RowPacking(Protocol):
    """Each implementation does the same, bit for bit, and none waits for the device."""

    def pack(self, per_request: torch.Tensor, state: RequestRows, num_rows: int) -> None:
        """Divides a step's rows among its requests (`RowDivision`).

        A request that feeds no prompt emits only what is confirmed and may lose drafts, whose
        values are those of `state.confidence`. Prompts are fed whole.

        Args:
            per_request: [NUM_COUNTS, R] int64, as in `RowLayout`, with the most of each. The counts
                of rows fed and read, and their places, are overwritten.
            state: with `confidence`.
            num_rows: of the step.
        """


class TorchRowPacking:
    """See `RowPacking`."""

    def __init__(self) -> None:
        self._division = TorchRowDivision()

    def pack(self, per_request: torch.Tensor, state: RequestRows, num_rows: int) -> None:
        assert state.confidence is not None, "Device rows without confidences."
        rows, num_prompt = per_request[ROW], per_request[NUM_PROMPT]
        most = torch.minimum(state.pending_lens[rows], per_request[Q_LEN]) - 1
        starts = self._division.divide(
            WantedRows(
                least=num_prompt.clamp(min=1),
                num_drafts=torch.where(num_prompt > 0, 0, most),
                confidence=state.confidence,
                rows=rows.contiguous(),
            ),
            num_rows,
        )
        per_request[Q_START], per_request[Q_LEN] = starts[:-1], starts.diff()
        num_read = torch.where(num_prompt > 0, per_request[NUM_READ], per_request[Q_LEN])
        per_request[NUM_READ] = num_read
        per_request[READ_START] = num_read.cumsum(0) - num_read
