"""Trees of drafts on the device, one per request."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_options import MAX_TREE_ROWS


class DraftTrees:
    """The shape of each request's pending tokens. Node 0 is the certain token, the root; node j is
    the pending token in column committed + j of the token table, and follows a node before it.

    Attributes:
        parents: [N, P] int32; the node that each follows, -1 for the root.
        depths: [N, P] int64; nodes above each, whose position is committed + depth.
        ancestors: [N, P] int64; bit j is set if node j is above the node or the node itself.

    Args:
        max_pending: P, at most MAX_TREE_ROWS.
    """

    def __init__(self, num_rows: int, max_pending: int, device: torch.device) -> None:
        assert max_pending <= MAX_TREE_ROWS, "A tree has more nodes than an ancestor mask has bits."
        shape = num_rows, max_pending
        self.parents = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.depths = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ancestors = torch.ones(shape, dtype=torch.int64, device=device)

    def write(self, rows: torch.Tensor, parents: torch.Tensor) -> None:
        """Writes the trees of `rows` [R].

        Args:
            parents: [R, D] int32; parents of the nodes 1 to D, each less than the node's own
                number. This holds also for nodes that a request does not have.
        """
        num_drafts = parents.shape[1]
        nodes = torch.arange(num_drafts + 1, device=rows.device)
        own = torch.ones_like(nodes) << nodes
        above = torch.cat((torch.zeros_like(parents[:, :1]), parents), 1).to(torch.int64)
        ancestors = own.expand(above.shape)
        # Each round doubles the height up to which the nodes above are known.
        for _ in range(max(num_drafts, 1).bit_length()):
            ancestors = ancestors | ancestors.gather(1, above)
            above = above.gather(1, above)
        bits = (ancestors[:, :, None] >> nodes) & 1
        self.parents[rows, 1 : num_drafts + 1] = parents
        self.depths[rows, : num_drafts + 1] = bits.sum(2) - 1
        self.ancestors[rows, : num_drafts + 1] = ancestors
