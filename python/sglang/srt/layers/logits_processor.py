"""From hidden states to the logits that are read."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def compute_logits(
    hidden: torch.Tensor, head_weight: torch.Tensor, batch: ForwardBatch
) -> torch.Tensor:
    """Projects only the rows that somebody reads.

    Args:
        hidden: [T, hidden_size], after the last norm.
        head_weight: [vocab_size, hidden_size].

    Returns:
        [S, vocab_size] float32.
    """
    if batch.logits_index is not None:
        hidden = hidden.index_select(0, batch.logits_index)
    return F.linear(hidden, head_weight).float()
