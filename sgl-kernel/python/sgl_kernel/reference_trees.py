"""The ops of draft trees in plain torch: what runs on the CPU, and what the kernels are tested
against. Trees of different sizes are padded to the widest here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.ragged_trees import RaggedTrees
from sgl_kernel.tree_mask_mode import TreeMaskMode, packed_row_bytes

_MOST_RAGGED_NODES = 64
_MOST_VERIFIED_NODES = 1024


class _Nodes(NamedTuple):
    """The nodes of R trees of N nodes.

    Attributes:
        seen: [R, N, N] bool; what each node sees.
        parents, first_child, next_sibling: [R, N] int64; -1 for none.
    """

    seen: torch.Tensor
    parents: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


def build_tree(
    parent_list: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    mode: TreeMaskMode,
) -> None:
    """Arguments and effect as `sgl_kernel.build_tree_kernel_efficient`."""
    num_requests, num_nodes = rows.shape
    if not num_requests:
        return
    group = torch.div(selected, topk, rounding_mode="floor")
    is_listed = (group > 0) & (group < parent_list.shape[1])
    wanted = torch.full_like(selected, -1)
    if parent_list.shape[1]:
        listed = parent_list.gather(1, torch.where(is_listed, group, 0))
        wanted = torch.where(is_listed, listed, -1)
    parents = torch.where(group == 0, 0, _find_before(selected, wanted))
    nodes = _link(torch.nn.functional.pad(parents, (1, 0), value=-1))
    depth = nodes.seen.sum(2) - 1
    positions.copy_((seq_lens[:, None] + depth).flatten())
    rows.copy_(torch.arange(rows.numel(), device=rows.device).view(rows.shape))
    first_child.copy_(nodes.first_child)
    next_sibling.copy_(nodes.next_sibling)
    if mode == TreeMaskMode.QLEN_ONLY:
        mask.view(-1).copy_(nodes.seen.flatten())
    elif mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        row_bytes = packed_row_bytes(num_nodes)
        bits = torch.nn.functional.pad(nodes.seen, (0, 8 * row_bytes - num_nodes))
        values = bits.view(num_requests, num_nodes, row_bytes, 8).long()
        weights = 1 << torch.arange(8, device=mask.device)
        mask.view(-1).copy_((values * weights).sum(3).flatten())
    else:
        _write_full_mask(mask.view(-1), nodes.seen, seq_lens)


def _write_full_mask(mask: torch.Tensor, seen: torch.Tensor, seq_lens: torch.Tensor) -> None:
    num_nodes, start = seen.shape[1], 0
    for own, seq_len in zip(seen, seq_lens.clamp(min=0).tolist(), strict=True):
        end = start + num_nodes * (seq_len + num_nodes)
        if end <= mask.shape[0]:
            mask[start:end].view(num_nodes, -1)[:, seq_len:] = own
        start = end


def build_ragged_trees(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    root_tokens: torch.Tensor,
    num_nodes: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
) -> RaggedTrees:
    """Arguments and result as `sgl_kernel.build_ragged_trees`."""
    num_requests, num_candidates, device = len(root_tokens), len(tokens), tokens.device
    first = starts[:-1]
    num_own = torch.where(first >= 0, starts[1:].clamp(max=num_candidates) - first, 0).clamp(min=0)
    sizes = torch.minimum(num_nodes, num_own + 1).clamp(0, _MOST_RAGGED_NODES)
    ends = sizes.cumsum(0).clamp(max=num_rows)
    row_starts = torch.nn.functional.pad(ends, (1, 0))
    sizes = row_starts.diff()

    numbers = torch.arange(max(num_own.tolist(), default=0) or 1, device=device)
    is_own = numbers < num_own[:, None]
    places = (first[:, None] + numbers).clamp(0, max(num_candidates - 1, 0))
    empty = torch.zeros(1, device=device)
    own_scores = (scores if num_candidates else empty)[places]
    keys = torch.where(is_own, torch.where(own_scores > 0, own_scores, 0.0), -1.0)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(1, order, numbers.expand_as(order))
    is_kept = is_own & (ranks < sizes[:, None] - 1)

    # The kept candidates in ascending order; what is after them is cut off below.
    chosen = torch.where(is_kept, numbers, len(numbers)).sort(dim=1).values
    chosen = torch.nn.functional.pad(chosen, (0, _MOST_RAGGED_NODES), value=len(numbers))
    chosen = chosen[:, : _MOST_RAGGED_NODES - 1]
    place = (first[:, None] + chosen).clamp(0, max(num_candidates - 1, 0))
    wanted = (parents if num_candidates else empty)[place].long()
    node_parents = torch.where(wanted == -1, 0, _find_before(chosen, wanted))
    is_node = torch.arange(_MOST_RAGGED_NODES, device=device) < sizes[:, None]
    node_parents = torch.nn.functional.pad(node_parents, (1, 0), value=-1)
    nodes = _link(torch.where(is_node, node_parents, -1))

    def packed(values: torch.Tensor, padding: int, dtype: torch.dtype) -> torch.Tensor:
        result = torch.full((num_rows,), padding, dtype=dtype, device=device)
        rows = values[is_node]
        result[: len(rows)] = rows.to(dtype)
        return result

    bits = 1 << torch.arange(_MOST_RAGGED_NODES, device=device)
    drafts = (tokens if num_candidates else empty)[place].long()
    depth = nodes.seen.sum(2) - 1
    return RaggedTrees(
        tokens=packed(torch.cat([root_tokens[:, None], drafts], 1), 0, torch.int64),
        parents=packed(nodes.parents, -1, torch.int32),
        positions=packed(seq_lens[:, None] + depth, 0, torch.int64),
        ancestors=packed((nodes.seen * bits).sum(2), -1, torch.int64),
        first_child=packed(nodes.first_child, -1, torch.int32),
        next_sibling=packed(nodes.next_sibling, -1, torch.int32),
        starts=row_starts.to(torch.int64).view(num_requests + 1),
    )


def _find_before(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Node (1 and more) before node j + 1 that holds wanted[:, j]; -1 if there is none.

    Args:
        ids: [R, N - 1] int64; of the nodes from 1 on.
        wanted: [R, N - 1] int64; below 0 for none.
    """
    if not ids.shape[1]:
        return wanted
    is_same = (ids[:, None] == wanted[:, :, None]) & (wanted >= 0)[:, :, None]
    size = ids.shape[1]
    is_before = is_same & is_same.new_ones(size, size).tril(-1)
    return torch.where(is_before.any(2), is_before.int().argmax(2) + 1, -1)


def _link(parents: torch.Tensor) -> _Nodes:
    """parents: [R, N] int64; a node before it, or -1."""
    num_nodes, device = parents.shape[1], parents.device
    own = torch.eye(num_nodes, dtype=torch.bool, device=device)
    seen = own.expand(len(parents), -1, -1).clone()
    seen[:, :, 0] = True
    is_linked = torch.zeros_like(parents, dtype=torch.bool)
    is_linked[:, 0] = True
    requests = torch.arange(len(parents), device=device)
    for node in range(1, num_nodes):
        parent = parents[:, node].clamp(min=0)
        is_linked[:, node] = (parents[:, node] >= 0) & is_linked[requests, parent]
        path = seen[requests, parent] & is_linked[:, node, None]
        seen[:, node] |= path
    is_linked[:, 0] = False
    linked = torch.where(is_linked, parents, -1)
    numbers = torch.arange(num_nodes, device=device)
    is_child = linked[:, None] == numbers[:, None]  # [R, parent, child]
    is_sibling = (linked[:, None] == linked[:, :, None]) & is_linked[:, :, None] & own.logical_not()
    return _Nodes(
        seen=seen,
        parents=linked,
        first_child=_lowest(is_child),
        next_sibling=_lowest(is_sibling & (numbers > numbers[:, None])),
    )


def _lowest(is_one: torch.Tensor) -> torch.Tensor:
    """The first True of the last axis, -1 if there is none."""
    return torch.where(is_one.any(-1), is_one.int().argmax(-1), -1)


class Trees(NamedTuple):
    """The links of R trees padded to N nodes: [R, N] int64, and [R] int64 nodes of each; row -1 is
    none."""

    tokens: torch.Tensor
    rows: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    places: torch.Tensor  # among the packed rows, in range
    sizes: torch.Tensor


def uniform_trees(
    tokens: torch.Tensor, rows: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor
) -> Trees:
    is_inside = (rows >= 0) & (rows < rows.numel())
    places = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
    sizes = torch.full_like(rows[:, 0], rows.shape[1])
    return Trees(tokens, torch.where(is_inside, rows, -1), first_child, next_sibling, places, sizes)


def packed_trees(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    starts: torch.Tensor,
) -> Trees:
    first, most = starts[:-1], _MOST_VERIFIED_NODES
    sizes = torch.where(first >= 0, starts[1:].clamp(max=len(tokens)) - first, 0).clamp(0, most)
    nodes = torch.arange(max(sizes.tolist(), default=0) or 1, device=tokens.device)
    places = (first[:, None] + nodes).clamp(0, max(len(tokens) - 1, 0))
    rows = torch.where(nodes < sizes[:, None], places, -1)
    if not len(tokens):
        return Trees(rows, rows, rows, rows, places, sizes)
    links = (first_child[places].long(), next_sibling[places].long())
    return Trees(tokens[places], rows, *links, places, sizes)


class TreeWalk:
    """One node of each tree at a time, from the root's first child on."""

    def __init__(self, trees: Trees, most_kept: int) -> None:
        self._trees = trees
        self._most_kept = most_kept
        self.requests = torch.arange(len(trees.sizes), device=trees.sizes.device)
        has_root = (trees.sizes > 0) & (trees.rows[:, 0] >= 0)
        self.path = torch.full(
            (len(self.requests), most_kept), -1, dtype=torch.int64, device=trees.sizes.device
        )
        self.path[:, 0] = torch.where(has_root, 0, -1)
        self.num_kept = has_root.long()
        self.last = torch.zeros_like(self.num_kept)
        self.node = torch.zeros_like(self.num_kept)
        self._follow(trees.first_child, has_root & (most_kept > 1))

    def is_walking(self) -> torch.Tensor:
        return self.node >= 0

    def of_node(self, values: torch.Tensor) -> torch.Tensor:
        """values: [R, N]."""
        return values[self.requests, self.node.clamp(min=0)]

    def step(self, is_taken: torch.Tensor) -> None:
        """To the first child of what is taken, to the next sibling of what is not."""
        taken = self.requests[is_taken]
        self.path[taken, self.num_kept[taken]] = self.node[taken]
        self.last = torch.where(is_taken, self.node, self.last)
        self.num_kept += is_taken
        links = torch.where(is_taken[:, None], self._trees.first_child, self._trees.next_sibling)
        self._follow(links, self.is_walking() & (self.num_kept < self._most_kept))

    def _follow(self, links: torch.Tensor, is_walking: torch.Tensor) -> None:
        link = self.of_node(links)
        is_valid = is_walking & (link > self.node) & (link < self._trees.sizes)
        self.node = torch.where(is_valid, link, -1)


def _walk_greedily(trees: Trees, targets: torch.Tensor, most_kept: int) -> TreeWalk:
    """targets: [R, N] int64; after each node."""
    walk = TreeWalk(trees, most_kept)
    while bool(walk.is_walking().any()):
        is_match = walk.of_node(trees.tokens) == targets[walk.requests, walk.last]
        walk.step(is_match & (walk.of_node(trees.rows) >= 0) & walk.is_walking())
    return walk


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    rows: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Arguments and effect as `sgl_kernel.verify_tree_greedy`."""
    if not len(candidates):
        return
    trees = uniform_trees(candidates, rows, first_child, next_sibling)
    targets = target_predict.flatten()[trees.rows.clamp(min=0)]
    walk = _walk_greedily(trees, targets, accept_index.shape[1])
    next_token = targets[walk.requests, walk.last]
    write_uniform(predicts, accept_index, accept_token_num, trees, walk, next_token)


def verify_ragged_trees(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    starts: torch.Tensor,
    max_kept: int,
) -> ConfirmedDrafts:
    """Arguments and result as `sgl_kernel.verify_ragged_trees`."""
    trees = packed_trees(tokens, first_child, next_sibling, starts)
    own_targets = targets[trees.places] if len(targets) else trees.places
    walk = _walk_greedily(trees, own_targets, max_kept)
    return as_confirmed(walk, own_targets[walk.requests, walk.last])


def write_uniform(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    trees: Trees,
    walk: TreeWalk,
    next_token: torch.Tensor,
) -> None:
    is_kept = walk.path >= 0
    nodes = walk.path.clamp(min=0)
    kept_rows = trees.rows.gather(1, nodes)
    accept_index.copy_(torch.where(is_kept, kept_rows, -1))
    accept_token_num.copy_((walk.num_kept - 1).clamp(min=0))
    behind = torch.cat([trees.tokens.gather(1, nodes)[:, 1:], next_token[:, None]], 1)
    is_last = torch.arange(nodes.shape[1], device=nodes.device) == walk.num_kept[:, None] - 1
    behind = torch.where(is_last, next_token[:, None], behind)
    predicts[kept_rows[is_kept]] = behind[is_kept].to(torch.int32)


def as_confirmed(walk: TreeWalk, next_token: torch.Tensor) -> ConfirmedDrafts:
    return ConfirmedDrafts(
        num_confirmed=(walk.num_kept - 1).clamp(min=0),
        path=walk.path.to(torch.int32),
        next_token=torch.where(walk.num_kept > 0, next_token, 0),
    )
