"""What EAGLE's steps hand to each other: chains or trees of D requests, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.step.request_rows import RequestRows, confidence_of_scores


@dataclass(frozen=True, slots=True)
class EagleDraftInput:
    """What a draft step of the head feeds: the draft chosen last.

    Attributes:
        token_ids: [D] int64; the target's ids.
        hidden_states: [D, hidden_size]; the head's own output that they were chosen from.
        scores: [D] float32; probability of the chain up to these tokens, by the head.
    """

    token_ids: torch.Tensor
    hidden_states: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class EagleVerifyInput:
    """Chains or trees that the target verifies in its next step, each behind its request's certain
    token.

    Attributes:
        draft_token: [D, S] int64; the target's ids.
        scores: [D, S] float32; by the head, the probability that a draft and all that it follows
            are right: the product of the probabilities along its path. None is greater than the one
            before it.
        parents: [D, S] int32; see `DraftTrees.write`. None: chains.
    """

    draft_token: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor | None = None

    @property
    def confidence(self) -> torch.Tensor:
        """[D, S] float32; that a draft is right, if those before it are (`Confidence.drafts`). Of a
        tree the share of the score before it, so that products are scores there too."""
        return confidence_of_scores(self.scores)

    def write(self, state: RequestRows, rows: torch.Tensor) -> None:
        """Hands them to the next step of the target; rows [D] int64, of the token table."""
        counts = torch.full_like(rows, self.draft_token.shape[1])
        confidence = None if state.confidence is None else self.confidence
        state.write_drafts(rows, self.draft_token, counts, self.parents, confidence)
