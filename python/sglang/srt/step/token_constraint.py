"""Applies a grammar, between the forward pass of a step and the choice of its tokens.

A grammar runs on the host, and the tokens that it allows after a draft depend on the draft. So the
worker gives the drafts that it feeds to the constraint, and applies the returned masks to the
logits. The forward pass goes on meanwhile: on a device it is launched first, since the constraint
may read the result of the step before; on a CPU it runs between the question and the answer.

A request whose masks are late sits the step out: it is fed and gets no token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang.srt.device_copies import to_device

BITS = 32  # of an entry of a mask


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Drafts that a request feeds in a step.

    Attributes:
        first_row: index among the S rows read of the row of the request's certain token (or of the
            end of its prompt). The row of draft j is first_row + 1 + j.
        tokens: the drafts.
        parents: for each draft the token that it follows: 0 for the certain token, j + 1 for draft
            j.
    """

    first_row: int
    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that may be chosen.

    Attributes:
        rows: indices of the restricted rows among the S read.
        bitmask: [len(rows), ceil(V / 32)] int32, on the host; token t is allowed if bit t % 32 of
            entry t // 32 is set, the lowest bit first, as grammar libraries write it. Each row
            allows a token at least.
        most: by index in the batch, the most tokens that a request may get: 0 where its masks are
            late, 1 where only those after its drafts are. Others may get any number.
    """

    rows: list[int]
    bitmask: torch.Tensor
    most: Mapping[int, int] = field(default_factory=dict)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sets the logits of tokens that are not allowed to -inf, in logits [S, V]."""
        if not self.rows:
            return logits
        packed = self.bitmask.pin_memory() if logits.is_cuda else self.bitmask
        packed = packed.to(logits.device, non_blocking=True)
        bits = torch.arange(BITS, dtype=torch.int32, device=logits.device)
        is_allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 1
        rows = to_device(self.rows, logits.device)
        return logits.index_copy_(0, rows, logits[rows].masked_fill(~is_allowed, float("-inf")))


class TokenConstraint(Protocol):
    """Restricts the tokens of some requests of a step.

    Attributes:
        requests: their indices in the batch; each emits, and only what is confirmed.
    """

    requests: Sequence[int]

    def ask(self, drafted: list[DraftedTokens]) -> None:
        """Asks which tokens each of `requests` may get after its certain token and after each
        draft. Look-ahead rows after the drafts need no mask, since their predictions are only
        proposed. Called once, as soon as the step before has been computed or the forward pass
        launched."""

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        """Returns the answers. Called once, after `ask`.

        Args:
            is_computed: whether the forward pass is done; until then waiting costs nothing.
        """
