"""One step of one greedy request, in plain Python.

`TpModelWorker` does the same for a batch, on the device, without waiting for the step before. A
test (`test_one_round.py`) compares the two token by token and step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple


class Choice(NamedTuple):
    """The token that the model finds most probable after a row."""

    token: int
    prob: float


# Feeds tokens at positions `start`, `start + 1`, ... and leaves their KV there, over what was there
# before. Returns the choice after each of these rows.
Model = Callable[[Sequence[int], int], list[Choice]]


@dataclass
class Request:
    """A request between two steps.

    Attributes:
        tokens: prompt and output, all certain.
        committed: how many of `tokens` have KV; the others are pending.
        drafts: tokens that may follow `tokens`, to be verified.
    """

    tokens: list[int]
    committed: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LookAhead:
    """The look-ahead of a request.

    Attributes:
        num_masks: mask tokens fed after the drafts; 0: no multi-token prediction.
        mask_token_id: of these.
        tau: least probability of a prediction from a mask.
        verifies: predictions are drafts of the next step; False: they are emitted at once.
        propose: makes drafts after the certain tokens (a head, a draft model, n-grams).
    """

    num_masks: int = 0
    mask_token_id: int = -1
    tau: float = 0.0
    verifies: bool = True
    propose: Callable[[Sequence[int]], list[int]] | None = None


PLAIN = LookAhead()


def one_round(request: Request, model: Model, ahead: LookAhead = PLAIN) -> list[int]:
    """Runs one step and returns the tokens that it emits."""
    # Decide: the tokens without KV, then the drafts, then masks.
    pending, drafts = request.tokens[request.committed :], request.drafts
    masks = [ahead.mask_token_id] * ahead.num_masks

    # Execute: one pass. Read the rows from the last certain token on.
    choices = model([*pending, *drafts, *masks], request.committed)[len(pending) - 1 :]

    # Confirm: a draft is right if the row before it chooses it. The row after the last right draft
    # gives one more certain token.
    num_right = 0
    while num_right < len(drafts) and choices[num_right].token == drafts[num_right]:
        num_right += 1
    emitted = [choice.token for choice in choices[: num_right + 1]]

    # The rows of masks predict what follows, if the text before them is right.
    predicted: list[int] = []
    if num_right == len(drafts):
        probable = takewhile(lambda each: each.prob >= ahead.tau, choices[num_right + 1 :])
        predicted = [choice.token for choice in probable]
    if not ahead.verifies and choices[num_right].prob >= ahead.tau:
        emitted += predicted

    # Commit: KV of certain rows stays; that of wrong drafts and masks is written over.
    request.committed += len(pending) + num_right
    request.tokens += emitted

    # Propose: drafts for the next step.
    request.drafts = predicted if ahead.verifies else []
    if ahead.propose is not None:
        request.drafts = ahead.propose(request.tokens)
    return emitted
