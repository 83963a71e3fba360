"""The answer of `build_ragged_trees` for each packed row."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RaggedTrees(NamedTuple):
    """The trees of R requests, packed: request i has rows starts[i] to starts[i + 1] of T.

    Nodes are numbered within their request, 0 is the root, and a node comes after its parent.

    Attributes:
        tokens: [T] int64; what a row feeds.
        parents: [T] int32; node that a row follows; -1 for the root, and for a node whose path does
            not lead to the root.
        positions: [T] int64; the root's position, and one more for each step away from it.
        ancestors: [T] int64; bit j: the row sees node j. Its own bit and bit 0 are set.
        first_child, next_sibling: [T] int32; a node, or -1. Siblings are in ascending order.
        starts: [R + 1] int64.

    The rows from starts[R] on are padding: token 0 at position 0, ancestors -1, no links.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    starts: torch.Tensor
