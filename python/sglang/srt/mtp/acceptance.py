"""Which predictions of a step are accepted: static k, conf_adapt, and the lossless mode.

"Multi-Token Prediction via Self-Distillation" (arXiv 2602.06019) describes static k and conf_adapt;
the lossless mode also reads the rows of the pending tokens, which predict those tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Readings:
    """What the logits of a step say. R requests, up to N rows read of each, up to P pending tokens.

    A verified request's rows begin at its first pending token, all others' at their last certain
    token. A request without look-ahead is a verified one with k = 1.

    Attributes:
        targets: [R, N] int64; the model's own token after each row.
        confident: [R, N] bool; whether that row's best probability reaches the threshold.
        pending: [R, P] int64; tokens that the step fed, the first of them certain.
        pending_lens: [R] int64; how many, 1 after a prompt.
        is_verified: [R] bool.
        num_predicted: [R] int64; k of this step, 0 before the end of a prompt: then one token stays
            pending, which means nothing.
    """

    targets: torch.Tensor
    confident: torch.Tensor
    pending: torch.Tensor
    pending_lens: torch.Tensor
    is_verified: torch.Tensor
    num_predicted: torch.Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Outcome of a step.

    Attributes:
        accept_lens: [R] int64; the first so many targets go to the client.
        kept_lens: [R] int64; the first so many pending tokens keep their KV.
        pending: [R, P] int64; tokens that the next step feeds.
        pending_lens: [R] int64; how many.
    """

    accept_lens: torch.Tensor
    kept_lens: torch.Tensor
    pending: torch.Tensor
    pending_lens: torch.Tensor


def accept(readings: Readings) -> Acceptance:
    """Static k and conf_adapt emit the longest confident prefix of the k predictions, at least one
    token; it becomes pending. A verified request emits the drafts that the row before each
    confirms and the token after them; if all are confirmed, the confident predictions behind that
    token are the next drafts."""
    targets, pending, verified = readings.targets, readings.pending, readings.is_verified
    num_read, num_pending = targets.shape[1], pending.shape[1]
    num_drafts = min(num_pending - 1, num_read)
    offsets = torch.arange(num_pending, device=targets.device)
    is_draft = offsets[:num_drafts] < (readings.pending_lens - 1)[:, None]
    matches = (pending[:, 1 : 1 + num_drafts] == targets[:, :num_drafts]) & is_draft
    num_confirmed = matches.long().cumprod(1).sum(1) * verified
    is_mismatch = verified & (num_confirmed < readings.pending_lens - 1)

    window = (num_confirmed[:, None] + offsets).clamp(max=num_read - 1)
    num_usable = torch.where(is_mismatch, 1, readings.num_predicted)
    confident = readings.confident.gather(1, window) & (offsets < num_usable[:, None])
    confident[:, 0] |= verified
    next_lens = confident.long().cumprod(1).sum(1).clamp(min=1)
    return Acceptance(
        accept_lens=torch.where(verified, num_confirmed + 1, next_lens),
        kept_lens=torch.where(verified, num_confirmed + 1, readings.pending_lens),
        pending=targets.gather(1, window),
        pending_lens=next_lens,
    )
