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
    EMITS_ONLY_CONFIRMED,
    NUM_PREDICTED,
    NUM_PROMPT,
    READ_START,
    ROW,
)


@dataclass(frozen=True, slots=True)
class AcceptanceInputs:
    """What the logits of a step say. R requests, up to N rows read of each, up to P pending tokens.

    The rows of a request that emits only what is confirmed begin at its first pending token, those
    of all others at their last one.

    Attributes:
        targets: [R, N] int64; the model's own token after each row.
        confident: [R, N] bool; whether that row's best probability reaches the threshold.
        pending: [R, P] int64; tokens that the step fed, the first of them certain.
        pending_lens: [R] int64; how many, 1 after a prompt.
        emits_only_confirmed: [R] bool; see `StepCounts`.
        num_predicted: [R] int64; k of this step; 0 before the end of a prompt, where the pending
            token is a placeholder.
    """

    targets: torch.Tensor
    confident: torch.Tensor
    pending: torch.Tensor
    pending_lens: torch.Tensor
    emits_only_confirmed: torch.Tensor
    num_predicted: torch.Tensor


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """What follows from `AcceptanceInputs`.

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


def decide_acceptance(inputs: AcceptanceInputs) -> AcceptanceResult:
    """Static k and conf_adapt emit the longest confident prefix of the k predictions, at least one
    token; it becomes pending. A request that emits only what is confirmed gets the drafts that the
    row before each confirms, and the token after them; if all are confirmed, the confident
    predictions behind that token are the next drafts."""
    targets, pending = inputs.targets, inputs.pending
    only_confirmed = inputs.emits_only_confirmed
    num_read, num_pending = targets.shape[1], pending.shape[1]
    num_drafts = min(num_pending - 1, num_read)
    offsets = torch.arange(num_pending, device=targets.device)
    is_draft = offsets[:num_drafts] < (inputs.pending_lens - 1)[:, None]
    matches = (pending[:, 1 : 1 + num_drafts] == targets[:, :num_drafts]) & is_draft
    num_confirmed = matches.long().cumprod(1).sum(1) * only_confirmed
    is_mismatch = only_confirmed & (num_confirmed < inputs.pending_lens - 1)

    window = (num_confirmed[:, None] + offsets).clamp(max=num_read - 1)
    num_usable = torch.where(is_mismatch, 1, inputs.num_predicted)
    confident = inputs.confident.gather(1, window) & (offsets < num_usable[:, None])
    confident[:, 0] |= only_confirmed
    next_lens = confident.long().cumprod(1).sum(1).clamp(min=1)
    return AcceptanceResult(
        accept_lens=torch.where(only_confirmed, num_confirmed + 1, next_lens),
        kept_lens=torch.where(only_confirmed, num_confirmed + 1, inputs.pending_lens),
        pending=targets.gather(1, window),
        pending_lens=next_lens,
    )


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What was drawn from the S rows read of a step of R requests.

    Attributes:
        per_request: [NUM_COUNTS, R] int64; see `RowLayout.per_request`.
        tokens: [S] int64.
        probs: [S] float32; the best probability of each row; None where nobody has a threshold.
        max_rows_read: rows read of a request, at most.
        max_accepted: tokens that can be accepted of a request, at most.
    """

    per_request: torch.Tensor
    tokens: torch.Tensor
    probs: torch.Tensor | None
    max_rows_read: int
    max_accepted: int

    def by_request(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """[S] -> [R, width]; columns past a request's rows hold values of other requests."""
        columns = torch.arange(width, device=values.device)
        places = self.per_request[READ_START][:, None] + columns
        return values[places.clamp(max=len(values) - 1)]


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What a step gives its R requests.

    Attributes:
        accept_lens: [R] int64; 0 where the step emits nothing.
        kept_lens: [R] int64.
        next_token_ids: [R, max_accepted] int64; the first accept_lens[i] of row i are accepted.
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

    def accept(self, drawn: DrawnTokens) -> AcceptedTokens: ...


class TorchAcceptance:
    """`decide_acceptance`, for a CPU; the oracle of all others."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        self._state = state
        self._thresholds = thresholds

    def accept(self, drawn: DrawnTokens) -> AcceptedTokens:
        state, per_request = self._state, drawn.per_request
        rows, num_prompt = per_request[ROW], per_request[NUM_PROMPT]
        targets = drawn.by_request(drawn.tokens, drawn.max_rows_read)
        confident = torch.ones_like(targets, dtype=torch.bool)
        if drawn.probs is not None:
            probs = drawn.by_request(drawn.probs, drawn.max_rows_read)
            confident = probs >= self._thresholds[rows][:, None]
        result = decide_acceptance(
            AcceptanceInputs(
                targets=targets,
                confident=confident,
                pending=state.pending(rows),
                pending_lens=state.pending_lens[rows],
                emits_only_confirmed=per_request[EMITS_ONLY_CONFIRMED].bool(),
                num_predicted=per_request[NUM_PREDICTED],
            )
        )
        kept_lens = torch.where(num_prompt > 0, num_prompt, result.kept_lens)
        state.committed[rows] += kept_lens
        state.pending_lens[rows] = result.pending_lens
        self._write_pending(rows, per_request[EMITS].bool(), result)
        return AcceptedTokens(
            accept_lens=result.accept_lens * per_request[EMITS],
            kept_lens=kept_lens,
            next_token_ids=drawn.by_request(drawn.tokens, drawn.max_accepted),
        )

    def _write_pending(
        self, rows: torch.Tensor, emits: torch.Tensor, result: AcceptanceResult
    ) -> None:
        """What is pending goes to the token table, behind the new watermark; where nothing is
        emitted, the prompt's next tokens are there already."""
        state, emits = self._state, emits[:, None]
        first = state.committed[rows][:, None]
        offsets = torch.arange(state.max_pending, device=rows.device)
        is_pending = offsets < result.pending_lens[:, None]
        # Columns are named twice where fewer tokens are pending; they get the same token twice.
        columns = first + torch.where(is_pending & emits, offsets, 0)
        tokens = torch.where(is_pending, result.pending, result.pending[:, :1]).to(torch.int32)
        known = state.tokens[rows[:, None], columns]
        state.tokens[rows[:, None], columns] = torch.where(emits, tokens, known)
        end = (first + result.pending_lens[:, None])[:, 0]
        state.num_tokens[rows] = torch.where(emits[:, 0], end, state.num_tokens[rows])
