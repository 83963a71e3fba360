"""Applies a grammar: between the forward pass of a step and the choice of its tokens.

A grammar runs on the host, and what it allows after a draft depends on the draft. So the worker
hands the drafts that it feeds to the constraint, and applies the masks that come back to the
logits. The forward pass goes on meanwhile: on a device it is launched first, since the constraint
may read the result of the step before; on a CPU it runs between the question and the answer.

A request whose masks are late sits the step out: it is fed, and given nothing.
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
        first_row: of the S rows read of the step, that of the request's certain token (or of the
            end of its prompt). That of draft j is first_row + 1 + j.
        tokens: of the drafts.
        parents: of each draft the one that it follows, 0 for the certain token, j + 1 for draft j.
    """

    first_row: int
    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that may be chosen.

    Attributes:
        rows: which of the S rows read are restricted.
        bitmask: [len(rows), ceil(V / 32)] int32, on the host; token t is allowed if bit t % 32 of
            entry t // 32 is set, the lowest bit first, as grammar libraries write it. Each row
            allows a token at least.
        most: tokens that a request may be given at most, by its index in the batch: 0 where its
            masks are late, 1 where those after its drafts are. Others may have any number.
    """

    rows: list[int]
    bitmask: torch.Tensor
    most: Mapping[int, int] = field(default_factory=dict)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], overwritten: those of tokens that are not allowed are -inf."""
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
        """Asks what each of `requests` may be given after its certain token and after each draft.
        Rows of look-ahead after the drafts need no mask: what they predict is only proposed.
        Called once, as soon as the step before has been computed or the forward pass launched."""

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        """Returns the answers. Called once, after `ask`.

        Args:
            is_computed: whether the forward pass is done; until then waiting costs nothing.
        """
