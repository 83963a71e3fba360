"""Turns the steps of a draft model into what the target verifies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel import build_tree_kernel_efficient as build_tree_kernel_efficient
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.step.request_rows import confidence_of_scores


def organize_draft_results(drafts: Sequence[EagleDraftInput]) -> EagleVerifyInput:
    """The chains of S drafts each, of what the head chose one after the other."""
    return EagleVerifyInput(
        draft_token=torch.stack([each.token_ids for each in drafts], dim=1),
        confidence=confidence_of_scores(torch.stack([each.scores for each in drafts], dim=1)),
    )
