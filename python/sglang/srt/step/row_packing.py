"""Packed steps: the device decides how many rows each request feeds. Here in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.row_division import TorchRowDivision, WantedRows
from sglang.srt.step.step_ops import (
    EMITS,
    EMITS_ONLY_CONFIRMED,
    NUM_PREDICTED,
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

        A request that emits only what is confirmed and feeds no prompt may lose look-ahead rows:
        its drafts and the masks after them have the values of `state.confidence`. All others feed
        all their rows: their prompt or pending tokens, and all their masks.

        Args:
            per_request: [NUM_COUNTS, R] int64, as in `RowLayout`, with the most of each. The counts
                of rows fed, read and predicted, and their places, are overwritten.
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
        pending_lens = state.pending_lens[rows]
        is_cut = (num_prompt == 0) & (per_request[EMITS_ONLY_CONFIRMED] > 0)
        num_masks = (per_request[NUM_PREDICTED] - 1).clamp(min=0)
        most = per_request[Q_LEN] - 1  # of rows that may be lost
        num_drafts = torch.minimum(pending_lens - 1, most)
        known = torch.where(num_prompt > 0, num_prompt, pending_lens)
        divided = self._division.divide(
            WantedRows(
                least=torch.where(is_cut, 1, known + num_masks),
                num_drafts=torch.where(is_cut, num_drafts, 0),
                num_masks=torch.where(is_cut, torch.minimum(num_masks, most - num_drafts), 0),
                draft_confidence=state.confidence.drafts,
                mask_confidence=state.confidence.masks,
                rows=rows.contiguous(),
            ),
            num_rows,
        )
        starts = divided.q_starts
        per_request[Q_START], per_request[Q_LEN] = starts[:-1], starts.diff()
        predicted = (1 + divided.num_masks_kept) * per_request[EMITS]
        per_request[NUM_PREDICTED] = torch.where(is_cut, predicted, per_request[NUM_PREDICTED])
        num_read = torch.where(is_cut, per_request[Q_LEN], per_request[NUM_READ])
        per_request[NUM_READ] = num_read
        per_request[READ_START] = num_read.cumsum(0) - num_read
