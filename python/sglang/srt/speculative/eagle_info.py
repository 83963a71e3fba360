"""The data that EAGLE's steps hand to each other: chains or trees of D requests, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import StepOps


@dataclass(frozen=True, slots=True)
class EagleDraftInput:
    """The input of a draft step of the head: the draft chosen last.

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
    """Chains or trees that the target verifies in its next step, each after its request's certain
    token.

    Attributes:
        draft_token: [D, S] int64; the target's ids.
        confidence: [D, S] float32; by the head, the probability that a draft is right, if those
            before it are (`RequestRows.confidence`). None: not asked for.
        parents: [D, S] int32; see `DraftTrees.write`. None: chains.
        per_request_draft_token_num: [D] int64; how many of its S drafts each request proposes, the
            first ones; the certain token is not counted. None: all S.
    """

    draft_token: torch.Tensor
    confidence: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    per_request_draft_token_num: torch.Tensor | None = None

    def limited(self, counts: Sequence[int]) -> EagleVerifyInput:
        """Returns the first drafts of each of the D requests, no more than these counts. Where all
        get all of them, copies nothing to the device."""
        if min(counts) == self.draft_token.shape[1]:
            return self
        on_device = to_device(list(counts), self.draft_token.device, torch.int64)
        return replace(self, per_request_draft_token_num=on_device)

    def write(self, ops: StepOps, state: RequestRows, rows: torch.Tensor) -> None:
        """Hands them to the next step of the target; rows [D] int64, of the token table."""
        counts = self.per_request_draft_token_num
        ops.write_drafts(state, rows, self.draft_token, counts, self.parents, self.confidence)
