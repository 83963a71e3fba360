"""How probable it is that drafts of n-grams are right, by the length of the match behind them."""

from __future__ import annotations

import torch

from sglang.srt.speculative.ngram_tier import LONGEST_OF_CLASS, NUM_CLASSES
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE

WINDOW = 512.0  # trials of a class and position that are remembered, since text changes
PRIOR_TRIALS = 2.0  # trials that the prior counts as


class MatchConfidence:
    """Counts on the device, by class of match and place in the chain. Nothing waits for it.

    Attributes:
        tried: [NUM_CLASSES, D] float32; drafts that were fed, those before them being right.
        right: likewise; of these, the right ones.

    Args:
        num_rows: rows of the token table, padding included.
        max_drafts: D.
        padding_row: teaches nothing.
    """

    def __init__(
        self, num_rows: int, max_drafts: int, padding_row: int, device: torch.device
    ) -> None:
        self.tried = torch.zeros((NUM_CLASSES, max_drafts), device=device)
        self.right = torch.zeros_like(self.tried)
        self._classes = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._bounds = torch.tensor(LONGEST_OF_CLASS, device=device)
        self._places = torch.arange(max_drafts, device=device)
        self._padding_row = padding_row

    def learn(self, rows: torch.Tensor, num_fed: torch.Tensor, num_right: torch.Tensor) -> None:
        """What became of the drafts that `proposed` was last told of.

        Args:
            rows: [R] int64.
            num_fed: [R] int64; drafts of each that the step fed, 0 where there were none.
            num_right: [R] int64; how many of the first ones were right.
        """
        num_fed = torch.where(rows == self._padding_row, 0, num_fed)[:, None]
        num_right, places = num_right[:, None], self._places
        tried = (places < num_fed) & (places <= num_right)
        right = tried & (places < num_right)
        classes = self._classes[rows]
        self.tried.index_add_(0, classes, tried.to(self.tried.dtype))
        self.right.index_add_(0, classes, right.to(self.right.dtype))
        share = (WINDOW / self.tried.clamp(min=1.0)).clamp(max=1.0)
        self.tried *= share
        self.right *= share

    def proposed(self, rows: torch.Tensor, match_lens: torch.Tensor) -> torch.Tensor:
        """[R, D] float32; of drafts that follow matches of these lengths, for
        `RequestRows.write_drafts`; rows, match_lens [R] int64."""
        classes = torch.bucketize(match_lens, self._bounds)
        self._classes[rows] = classes
        share = self.right + PRIOR_TRIALS * PRIOR_CONFIDENCE
        return (share / (self.tried + PRIOR_TRIALS))[classes]
