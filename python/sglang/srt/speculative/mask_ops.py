"""Turns the predictions of mask tokens into accepted tokens (static k and conf_adapt) or into
drafts (the lossless mode).

"Multi-Token Prediction via Self-Distillation" (arXiv 2602.06019) describes static k and conf_adapt;
the lossless mode also reads the rows of the pending tokens, which predict those tokens again.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.speculative.drafter import ChosenTokens
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    EMITS,
    EMITS_ONLY_CONFIRMED,
    NUM_PREDICTED,
    READ_START,
    ROW,
    AcceptedTokens,
)


class MaskOps(Protocol):
    """Each implementation does the same, bit for bit, and none waits for the device."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        """Made before there is a request: it may overwrite row 0.

        Args:
            thresholds: [N] float32; tau of each row, 0 for static k.
        """

    def num_confident(self, chosen: ChosenTokens) -> torch.Tensor:
        """The longest confident prefix of each request's predictions, one token at least: [R]
        int64. What it says of requests that emit only what is confirmed means nothing."""

    def propose(self, chosen: ChosenTokens, accepted: AcceptedTokens) -> None:
        """Writes the drafts of requests that emit only what is confirmed: if all their drafts were,
        the confident predictions after the certain token; else there are none."""


class TorchMaskOps:
    """For a CPU; the oracle of all others."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        self._state = state
        self._thresholds = thresholds

    def num_confident(self, chosen: ChosenTokens) -> torch.Tensor:
        per_request = chosen.layout.per_request
        starts, num_predicted = per_request[READ_START], per_request[NUM_PREDICTED]
        return self._confident_run(chosen, starts, num_predicted).clamp(min=1)

    def propose(self, chosen: ChosenTokens, accepted: AcceptedTokens) -> None:
        layout, state = chosen.layout, self._state
        assert layout.lookahead is not None, "A step without look-ahead."
        per_request = layout.per_request
        num_confirmed = accepted.accept_lens - 1
        is_whole = num_confirmed == layout.lookahead.num_pending - 1
        proposes = is_whole & (per_request[EMITS] * per_request[EMITS_ONLY_CONFIRMED] > 0)
        first = per_request[READ_START] + num_confirmed + 1
        num_masks = torch.where(proposes, per_request[NUM_PREDICTED] - 1, 0)
        offsets = torch.arange(state.max_pending - 1, device=first.device)
        places = (first[:, None] + offsets).clamp(0, len(chosen.targets) - 1)
        num_drafts = self._confident_run(chosen, first, num_masks)
        state.write_drafts(per_request[ROW], chosen.targets[places], num_drafts)

    def _confident_run(
        self, chosen: ChosenTokens, starts: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        """Counts how many rows in a row, of the `lens` [R] rows read from `starts` [R] on, reach
        their request's threshold: [R] int64."""
        offsets = torch.arange(self._state.max_pending, device=starts.device)
        is_confident = offsets < lens[:, None]
        if chosen.probs is not None:
            places = (starts[:, None] + offsets).clamp(0, len(chosen.probs) - 1)
            thresholds = self._thresholds[chosen.layout.per_request[ROW]]
            is_confident &= chosen.probs[places] >= thresholds[:, None]
        return is_confident.long().cumprod(1).sum(1)
