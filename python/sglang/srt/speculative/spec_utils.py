"""Choosing drafts from a draft model's logits."""

from __future__ import annotations

from types import ModuleType

import torch


def select_top_k_tokens(
    logits: torch.Tensor, scores: torch.Tensor | None, topk: int, ops: ModuleType
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable token of each chain, the lowest of several.

    Args:
        logits: [D, V].
        scores: [D] float32; probability of each chain so far; None where it begins.
        topk: 1. Trees, of more than 1, are drafted by `DraftTreePass`.
        ops: of `sampling_ops`.

    Returns:
        The tokens [D] int64, columns of the logits, and the probabilities of the chains with them
        [D] float32.
    """
    assert topk == 1, "Chains alone; DraftTreePass drafts trees."
    token_ids, _, logprobs = ops.argmax_logprob(logits, None)
    probs = logprobs.exp()
    return token_ids, probs if scores is None else scores * probs
