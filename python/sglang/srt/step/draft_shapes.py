"""The shape of a request's drafts in a step: a chain or a tree. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.forward_options import MAX_TREE_ROWS

MAX_ROWS = MAX_TREE_ROWS  # of a request: in all draft steps, and in the verification of a tree


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of trees of drafts.

    Attributes:
        topk: K, children of each node of a beam, and nodes of a beam; at least 1.
        depth: S, the most drafts one after the other; at least 1. The first ones come from the
            head's pass over the target's rows, so there are S - 1 draft steps.
        num_drafts: D, nodes of a tree without its root, the certain token; at least 1.

    Raises:
        ValueError: if the head finds fewer nodes than a tree is to have, or ancestor masks have too
            few bits for all rows.
    """

    topk: int
    depth: int
    num_drafts: int

    def __post_init__(self) -> None:
        if min(self.topk, self.depth, self.num_drafts) < 1:
            raise ValueError(f"A tree has at least one draft: {self}.")
        if self.num_drafts > self.num_found:
            raise ValueError(
                f"Beams of {self.topk} and {self.depth} steps find {self.num_found} drafts, fewer"
                f" than the {self.num_drafts} of a tree."
            )
        if max(self.num_fed, 1 + self.num_drafts) > MAX_ROWS:
            raise ValueError(
                f"{self.num_fed} rows of draft steps and {1 + self.num_drafts} rows to verify:"
                f" masks have {MAX_ROWS} bits."
            )

    @property
    def num_steps(self) -> int:
        """Draft steps, of K rows each."""
        return self.depth - 1

    @property
    def num_fed(self) -> int:
        """Rows of a request in all draft steps; each has a slot of its own."""
        return self.topk * self.num_steps

    @property
    def num_slots(self) -> int:
        """Slots of a request that a pass gets, at least one."""
        return max(1, self.num_fed)

    @property
    def num_found(self) -> int:
        """Nodes from which the drafts are chosen."""
        return self.topk + self.num_steps * self.topk**2

    @property
    def max_confirmed(self) -> int:
        """The most drafts of a tree that may be confirmed."""
        return min(self.depth, self.num_drafts)


DraftShape = int | TreeShape  # the steps of a chain, or a tree


def num_steps_of(shape: DraftShape) -> int:
    """Draft steps."""
    return shape if isinstance(shape, int) else shape.num_steps
