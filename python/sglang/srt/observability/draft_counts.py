"""Counts what became of drafts since the start; averages are of any span between two counts."""

from __future__ import annotations

from typing import NamedTuple


class DraftCounts(NamedTuple):
    """Counts of steps of requests that look ahead, one per request and step.

    Attributes:
        num_steps: those without drafts too; num_tokens: what they gave.
        num_verifications: those that verified drafts.
        num_drafts: drafts that were verified; num_confirmed: of them.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_verifications: int = 0
    num_drafts: int = 0
    num_confirmed: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Adds the counts of a later step."""
        return DraftCounts(*(mine + more for mine, more in zip(self, other, strict=True)))

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Counts what came after `earlier`, which were these counts once."""
        return DraftCounts(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def accept_length(self) -> float | None:
        """Divides tokens by steps; None without any."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def accept_rate(self) -> float | None:
        """Gives the share of the drafts verified that were confirmed."""
        return self.num_confirmed / self.num_drafts if self.num_drafts else None

    @property
    def drafts_per_step(self) -> float | None:
        """Divides drafts verified by steps; None without any."""
        return self.num_drafts / self.num_steps if self.num_steps else None
