"""Says which numbers of drafts a policy may choose. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.lookahead.adaptive_config import AdaptiveConfig


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Holds what a policy may choose from.

    Attributes:
        max_drafts: drafts of a request in a step, at least 1.
        initial: the tier before anything is known, where a policy has such a one.
        adaptive: which tiers batches of each size may have; None: not given.
        has_trees: a tier is the first nodes of each request's tree; False: of its chain.
    """

    max_drafts: int
    initial: int = 0
    adaptive: AdaptiveConfig | None = None
    has_trees: bool = False

    def candidates(self, batch_size: int) -> tuple[int, ...] | None:
        """Gives those of a batch of this size, padding included; None: not given."""
        return None if self.adaptive is None else self.adaptive.candidates(batch_size)
