"""Which predictions of a step are accepted: static k, conf_adapt, and the lossless mode.

"Multi-Token Prediction via Self-Distillation" (arXiv 2602.06019) describes static k and conf_adapt;
the lossless mode also reads the rows of the pending tokens, which predict those tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    EMITS,
    IS_VERIFIED,
    NUM_HOST,
    NUM_PREDICTED,
    READ_START,
    ROW,
)


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


@dataclass(frozen=True, slots=True)
class Predictions:
    """What was drawn from the S rows read of a step of R requests.

    Attributes:
        numbers: [NUM_COUNTS, R] int64; see `RowLayout.numbers`.
        tokens: [S] int64.
        probs: [S] float32; the best probability of each row; None where nobody has a threshold.
        most_read: rows read of a request, at most.
        most_accepted: tokens that can be accepted of a request, at most.
    """

    numbers: torch.Tensor
    tokens: torch.Tensor
    probs: torch.Tensor | None
    most_read: int
    most_accepted: int

    def dense(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """[S] -> [R, width]; columns past a request's rows hold values of other requests."""
        columns = torch.arange(width, device=values.device)
        places = self.numbers[READ_START][:, None] + columns
        return values[places.clamp(max=len(values) - 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gives its R requests.

    Attributes:
        accept_lens: [R] int64; 0 where the step emits nothing.
        kept_lens: [R] int64.
        next_token_ids: [R, most_accepted] int64; the first accept_lens[i] of row i are accepted.
    """

    accept_lens: torch.Tensor
    kept_lens: torch.Tensor
    next_token_ids: torch.Tensor


class AcceptanceOps(Protocol):
    """Accepts the predictions of a step and writes what follows to the device rows. Each
    implementation does the same, bit for bit, and none waits for the device."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        """Made before there is a request: it may overwrite row 0.

        Args:
            thresholds: [N] float32; tau of each row, 0 for static k.
        """

    def accept(self, predictions: Predictions) -> Outcome: ...


class TorchAcceptance:
    """`accept`, for a CPU; the oracle of all others."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        self._state = state
        self._thresholds = thresholds

    def accept(self, predictions: Predictions) -> Outcome:
        state, numbers = self._state, predictions.numbers
        rows, num_host = numbers[ROW], numbers[NUM_HOST]
        targets = predictions.dense(predictions.tokens, predictions.most_read)
        confident = torch.ones_like(targets, dtype=torch.bool)
        if predictions.probs is not None:
            probs = predictions.dense(predictions.probs, predictions.most_read)
            confident = probs >= self._thresholds[rows][:, None]
        outcome = accept(
            Readings(
                targets=targets,
                confident=confident,
                pending=state.pending[rows],
                pending_lens=state.pending_lens[rows],
                is_verified=numbers[IS_VERIFIED].bool(),
                num_predicted=numbers[NUM_PREDICTED],
            )
        )
        kept_lens = torch.where(num_host > 0, num_host, outcome.kept_lens)
        state.committed[rows] += kept_lens
        state.pending[rows] = outcome.pending
        state.pending_lens[rows] = outcome.pending_lens
        return Outcome(
            accept_lens=outcome.accept_lens * numbers[EMITS],
            kept_lens=kept_lens,
            next_token_ids=predictions.dense(predictions.tokens, predictions.most_accepted),
        )
