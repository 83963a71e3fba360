"""Says what the ops of draft trees may return, node by node, and makes the inputs that tests
share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sgl_kernel import RaggedTrees


class Node(NamedTuple):
    """A node of one tree; -1 for no node."""

    parent: int
    depth: int
    seen: set[int]
    first_child: int
    next_sibling: int


def nodes_of(parents: Sequence[int]) -> list[Node]:
    """parents: of each node; -1, also of the root, where there is none before it."""
    is_linked = [True]
    for parent in parents[1:]:
        is_linked.append(parent >= 0 and is_linked[parent])
    linked = [p if ok else -1 for p, ok in zip(parents, is_linked, strict=True)]
    linked[0] = -1
    nodes: list[Node] = []
    for node, parent in enumerate(linked):
        seen = {0, node} | (nodes[parent].seen if parent >= 0 else set())
        children = [other for other, p in enumerate(linked) if p == node]
        siblings = [other for other, p in enumerate(linked) if p == parent >= 0 and other > node]
        first_child, sibling = [*children, -1][0], [*siblings, -1][0]
        nodes.append(Node(parent, len(seen) - 1, seen, first_child, sibling))
    return nodes


@dataclass(frozen=True, slots=True)
class Drafted:
    """R requests, each with all candidates of `depth` levels, in the numbering of
    build_tree_kernel_efficient and as flat candidates."""

    topk: int
    depth: int
    parent_list: torch.Tensor
    seq_lens: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    starts: torch.Tensor
    root_tokens: torch.Tensor
    num_nodes: torch.Tensor
    num_rows: int

    def flat(self) -> tuple[torch.Tensor, ...]:
        """The tensors of build_ragged_trees."""
        candidates = (self.tokens, self.scores, self.parents, self.starts)
        return (*candidates, self.root_tokens, self.num_nodes, self.seq_lens)

    def selected(self, num_nodes: int) -> torch.Tensor:
        """[R, num_nodes - 1] int64; the best candidates of each request, ascending."""
        rows = []
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            rows.append(best_candidates(self.scores[first:end].tolist(), num_nodes - 1))
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), num_nodes - 1)

    def to(self, device: str) -> Drafted:
        tensors = {
            name: getattr(self, name).to(device)
            for name in (
                *("parent_list", "seq_lens", "tokens", "scores", "parents", "starts"),
                *("root_tokens", "num_nodes"),
            )
        }
        return replace(self, **tensors)


def best_candidates(scores: Sequence[float], count: int) -> list[int]:
    """Numbers of the best candidates, ascending; what is not above 0 counts as 0."""
    keys = [(-score if score > 0 else 0.0, number) for number, score in enumerate(scores)]
    return sorted(number for _, number in sorted(keys)[:count])


def drafted(num_requests: int, topk: int, depth: int, seed: int, num_nodes: int = 0) -> Drafted:
    """Draft steps with a beam of `topk`, among whose probabilities are 0, 1 and many equal ones.

    Args:
        num_nodes: of each tree; 0: any.
    """
    generator = random.Random(seed)
    parent_lists, all_scores, all_parents = [], [], []
    for _ in range(num_requests):
        scores = [generator.choice(_PROBABILITIES) for _ in range(topk)]
        parents = [-1] * topk
        beam = list(range(topk))
        parent_list = [-1]
        for _ in range(1, depth):
            parent_list += beam
            first = len(scores)
            for parent in beam:
                scores += [scores[parent] * generator.choice(_PROBABILITIES) for _ in range(topk)]
                parents += [parent] * topk
            level = best_candidates(scores[first:], topk)
            generator.shuffle(level)
            beam = [first + number for number in level]
        parent_lists.append(parent_list if depth > 1 else [])
        all_scores += scores
        all_parents += parents
    size = topk + (depth - 1) * topk * topk
    wanted = [num_nodes or generator.randint(1, min(64, size + 1)) for _ in range(num_requests)]
    return Drafted(
        topk=topk,
        depth=depth,
        parent_list=torch.tensor(parent_lists, dtype=torch.int64).view(num_requests, -1),
        seq_lens=torch.tensor([generator.randint(0, 40) for _ in range(num_requests)]),
        tokens=torch.tensor([generator.randint(0, 9) for _ in all_scores]),
        scores=torch.tensor(all_scores, dtype=torch.float32),
        parents=torch.tensor(all_parents, dtype=torch.int32),
        starts=torch.arange(num_requests + 1) * size,
        root_tokens=torch.tensor([generator.randint(0, 9) for _ in range(num_requests)]),
        num_nodes=torch.tensor(wanted),
        num_rows=sum(wanted),
    )


_PROBABILITIES = (1.0, 0.5, 0.5, 0.25, 0.3, 0.1, 0.0, 1e-30)


def uniform_parents(parent_list: Sequence[int], selected: Sequence[int], topk: int) -> list[int]:
    """Returns the parents of the nodes of one tree of build_tree_kernel_efficient."""
    parents = [-1]
    for node, candidate in enumerate(selected, start=1):
        before = list(selected[: node - 1])
        group = candidate // topk
        wanted = -1 if candidate < 0 or not 0 < group < len(parent_list) else parent_list[group]
        if 0 <= candidate < topk:
            parents.append(0)
        else:
            parents.append(1 + before.index(wanted) if wanted >= 0 and wanted in before else -1)
    return parents


def assert_ragged(case: Drafted, trees: RaggedTrees) -> None:
    """The trees on the CPU are what loops over requests and nodes say."""
    i64, i32 = torch.int64, torch.int32
    assert [part.dtype for part in trees] == [i64, i32, i64, i64, i32, i32, i64]
    row, num_requests = 0, len(case.root_tokens)
    starts = [0]
    for request in range(num_requests):
        first = int(case.starts[request])
        end = min(int(case.starts[request + 1]), len(case.tokens))
        own = range(first, end) if first >= 0 else range(0)
        scores = case.scores[own.start : own.stop].tolist() if own else []
        size = max(min(int(case.num_nodes[request]), len(scores) + 1, 64), 0)
        size = min(size, case.num_rows - row)
        chosen = best_candidates(scores, size - 1) if size else []
        parents = [-1]
        for node, number in enumerate(chosen, start=1):
            wanted = int(case.parents[first + number])
            before = chosen[: node - 1]
            parents.append(
                0 if wanted == -1 else 1 + before.index(wanted) if wanted in before else -1
            )
        nodes = nodes_of(parents) if size else []
        rows = slice(row, row + size)
        drafts = [int(case.tokens[first + number]) for number in chosen]
        length = int(case.seq_lens[request])
        assert trees.tokens[rows].tolist() == (
            [int(case.root_tokens[request]), *drafts] if size else []
        )
        assert trees.parents[rows].tolist() == [node.parent for node in nodes]
        assert trees.positions[rows].tolist() == [length + node.depth for node in nodes]
        masks = [sum(1 << seen for seen in node.seen) for node in nodes]
        assert [mask % 2**64 for mask in trees.ancestors[rows].tolist()] == masks
        assert trees.first_child[rows].tolist() == [node.first_child for node in nodes]
        assert trees.next_sibling[rows].tolist() == [node.next_sibling for node in nodes]
        row += size
        starts.append(row)
    assert trees.starts.tolist() == starts
    padding = [part[row:].tolist() for part in trees[:-1]]
    count = case.num_rows - row
    assert padding == [[value] * count for value in (0, -1, 0, -1, -1, -1)]
