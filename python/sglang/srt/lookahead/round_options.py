"""Says how many tokens are drafted and verified. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.lookahead.adaptive_config import MAX_BATCH_SIZE, AdaptiveConfig
from sglang.srt.registry import LENGTH_POLICIES
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.step_sizes import StepWidth

if TYPE_CHECKING:
    from sglang.srt.lookahead.length_policy import LengthPolicy

ALL_BATCH_SIZES = (range(1, MAX_BATCH_SIZE),)


@dataclass(frozen=True, slots=True)
class SpecRuntimeState:
    """Holds what a tier owns: its draft steps, whose graphs are its own. Graphs of the drafter's
    pass over the target's rows and of verification are chosen by their number of rows, so tiers
    share them."""

    speculative_num_steps: int  # drafts of a chain
    num_draft_steps: int  # of the drafter's model, one after the other, for as many drafts
    batch_sizes: tuple[range, ...] = ALL_BATCH_SIZES  # that may have the tier: it has graphs there


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """Says how many tokens are drafted and verified."""

    # Drafts of a chain or of a tree without draft steps, or one after the other in a `tree`, at
    # most; at least 1. To a policy of masks: masks of a request.
    num_steps: int
    tier_policy: str = "fixed"  # a name in `LENGTH_POLICIES` (registry.py)
    initial_steps: int | None = None  # drafts of a chain before a policy knows anything; None: all
    adaptive: AdaptiveConfig | None = None  # tiers of batches of each size; None: any
    # Steps are cut to the rows that pay (`TileSpec`); the folder of kept prices. None: never.
    tile_spec_cache: Path | None = None
    # Drafts of a chain without a draft step: the first one of a head is from the target's rows.
    num_free: int = 1
    # For benchmarks, drafts of a request that `TileSpec` verifies on average; None: those that pay.
    tile_spec_drafts: float | None = None
    tree: TreeShape | None = None  # of the drafts of all requests; its depth is num_steps
    # Drafts are trees without draft steps, whose first nodes are a tree, however many; a tier is
    # their number.
    trees_of_any_size: bool = False
    # Rows of the pass that drafts a chain of any length, of which each needs a slot; None: one.
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            assert self.tree.depth == self.num_steps, "A tree is as deep as there are steps."
            assert self.tier_policy == "fixed", "Trees are all of one shape."

    @property
    def initial(self) -> int:
        """Drafts of a chain before a policy knows anything."""
        return self.num_steps if self.initial_steps is None else self.initial_steps

    @property
    def has_trees(self) -> bool:
        """Tells whether drafts are trees."""
        return self.tree is not None or self.trees_of_any_size

    @property
    def policy(self) -> type[LengthPolicy]:
        """Chooses how long chains are."""
        kind: type[LengthPolicy] = LENGTH_POLICIES.load(self.tier_policy)
        return kind

    @property
    def needs_prices(self) -> bool:
        """Tells whether anything goes by prices of rounds."""
        return self.policy.needs_prices or self.tile_spec_cache is not None

    @property
    def states(self) -> dict[int, SpecRuntimeState]:
        """Gives those of all tiers, made once, before the first round."""
        states, adaptive = dict[int, SpecRuntimeState](), self.adaptive
        for tier in self.policy.tiers(self):
            sizes = ALL_BATCH_SIZES if adaptive is None else adaptive.batch_sizes(tier)
            states[tier] = SpecRuntimeState(tier, max(0, tier - self.num_free), sizes)
        return states

    @property
    def draft_steps(self) -> dict[DraftShape, tuple[range, ...]]:
        """See `ExecutionConfig.draft_steps`."""
        if self.tree is not None:
            return {self.tree: ALL_BATCH_SIZES}
        states = self.states.values()
        return {each.num_draft_steps: each.batch_sizes for each in states if each.num_draft_steps}

    @property
    def max_drafts(self) -> int:
        """Drafts of a request in a step."""
        return self.num_steps if self.tree is None else self.tree.num_drafts

    @property
    def max_confirmed(self) -> int | None:
        """Drafts of a request that a step may confirm; None: all, as of chains."""
        return None if self.tree is None else self.tree.max_confirmed

    def num_drafts(self, tier: int) -> int:
        """Drafts of a request at a tier."""
        return tier if self.tree is None else self.tree.num_drafts

    def num_draft_slots(self, tier: int) -> int:
        """Slots that the draft steps of a tier above 0 need after the rows kept."""
        chain = self.block_size or max(0, tier - self.num_free)
        return chain if self.tree is None else self.tree.num_slots

    @property
    def step_width(self) -> StepWidth:
        """Slots of any request: for rows that verify, and for draft steps after those kept."""
        rows, further = 1 + self.max_drafts, self.num_draft_slots(self.num_steps)
        kept = rows if self.max_confirmed is None else 1 + self.max_confirmed
        slots = max(rows, kept + further)
        return StepWidth(decode_rows=slots, lookahead_rows=further, max_kept=kept)
