"""Says what verifications of draft trees may return, draft by draft, and makes the inputs that
tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from tree_oracle import nodes_of


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """Packed trees of R requests; with equal sizes also the arguments of the uniform ops."""

    tokens: torch.Tensor
    targets: torch.Tensor
    parents: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    starts: torch.Tensor
    max_kept: int
    coins: torch.Tensor
    final_coins: torch.Tensor
    probs: torch.Tensor

    def ragged(self) -> tuple[torch.Tensor | int, ...]:
        """Arguments of verify_ragged_trees."""
        links = (self.first_child, self.next_sibling)
        return (self.tokens, self.targets, *links, self.starts, self.max_kept)

    def ragged_sampling(self) -> tuple[torch.Tensor | int, ...]:
        """Arguments of sample_ragged_trees."""
        links = (self.first_child, self.next_sibling)
        coins = (self.coins, self.final_coins, self.probs)
        return (self.tokens, *links, self.starts, *coins, self.max_kept)

    def uniform_trees(self) -> tuple[torch.Tensor, ...]:
        """candidates, retrive_index, retrive_next_token, retrive_next_sibling."""
        shape = (len(self.starts) - 1, -1)
        rows = torch.arange(len(self.tokens))
        parts = (self.tokens, rows, self.first_child.long(), self.next_sibling.long())
        return tuple(part.view(shape).contiguous() for part in parts)

    def to(self, device: str) -> VerifyCase:
        names = ("tokens", "targets", "parents", "first_child", "next_sibling", "starts")
        names = (*names, "coins", "final_coins", "probs")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def random_trees(
    num_requests: int, max_nodes: int, seed: int, size: int = 8, num_nodes: int = 0
) -> VerifyCase:
    """Trees whose drafts are often confirmed, with distributions over `size` tokens.

    Some siblings hold the same token, some nodes are linked to nothing, some tokens have no
    probability, and every sixth request has no rows.

    Args:
        num_nodes: of each tree; 0: up to max_nodes.
    """
    generator = random.Random(seed)
    tokens: list[int] = []
    targets: list[int] = []
    parents: list[int] = []
    links: list[tuple[int, int]] = []
    starts = [0]
    for request in range(num_requests):
        count = num_nodes or (0 if request % 6 == 5 else generator.randint(1, max_nodes))
        own_targets = [generator.randrange(size) for _ in range(count)]
        own_parents = [-1]
        for node in range(1, count):
            near = max(0, node - generator.choice([1, 2, 6, max_nodes]))
            is_alone = generator.random() < 0.05
            own_parents.append(-1 if is_alone else generator.randint(near, node - 1))
        own_parents = own_parents[:count]
        nodes = nodes_of(own_parents) if count else []
        for node, parent in enumerate(own_parents):
            is_confirmed = generator.random() < 0.4
            tokens.append(
                own_targets[max(parent, 0)] if is_confirmed else generator.randrange(size)
            )
            parents.append(nodes[node].parent)
            links.append((nodes[node].first_child, nodes[node].next_sibling))
        targets += own_targets
        starts.append(len(tokens))
    torch_generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(len(tokens), size, generator=torch_generator) ** 3
    probs *= torch.rand(len(tokens), size, generator=torch_generator) > 0.2
    probs[:, 0] += 1e-3
    return VerifyCase(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int32),
        first_child=torch.tensor([first for first, _ in links], dtype=torch.int32),
        next_sibling=torch.tensor([sibling for _, sibling in links], dtype=torch.int32),
        starts=torch.tensor(starts),
        max_kept=max_nodes,
        coins=torch.rand(len(tokens), generator=torch_generator),
        final_coins=torch.rand(num_requests, generator=torch_generator),
        probs=probs / probs.sum(1, keepdim=True),
    )


def rows_of(case: VerifyCase, request: int) -> range:
    """A request's rows, after what is out of range has been cut off."""
    start, end = case.starts[request : request + 2].tolist()
    end = min(end, len(case.tokens))
    return range(start, min(end, start + 1024)) if 0 <= start < end else range(0)


def children_of(case: VerifyCase, rows: range, node: int) -> list[int]:
    """In the order of the links, up to the first that leads to no later node."""
    children: list[int] = []
    last, link = node, int(case.first_child[rows[node]])
    while last < link < len(rows):
        children.append(link)
        last, link = link, int(case.next_sibling[rows[link]])
    return children


def greedy_path(case: VerifyCase, request: int) -> tuple[list[int], int]:
    """Kept nodes, and the token after the last."""
    rows = rows_of(case, request)
    if not rows:
        return [], 0
    path = [0]
    while len(path) < case.max_kept:
        target = int(case.targets[rows[path[-1]]])
        matches = [c for c in children_of(case, rows, path[-1]) if case.tokens[rows[c]] == target]
        if not matches:
            break
        path.append(matches[0])
    return path, int(case.targets[rows[path[-1]]])


def sampled_path(
    case: VerifyCase, request: int, threshold_single: float = 1.0, threshold_acc: float = 1.0
) -> tuple[list[int], dict[int, float]]:
    """Kept nodes, and the tokens refused after the last of them with their probabilities."""
    rows = rows_of(case, request)
    if not rows:
        return [], {}
    size = case.probs.shape[1]
    single, acc = torch.tensor([threshold_single, threshold_acc])
    path, refused = [0], {}
    while len(path) < case.max_kept:
        row = rows[path[-1]]
        mass, refused = torch.tensor(0.0), {}
        for child in children_of(case, rows, path[-1]):
            token = int(case.tokens[rows[child]])
            if not 0 <= token < size or token in refused or not case.probs[row, token] > 0:
                continue
            prob = case.probs[row, token]
            mass = mass + prob
            if case.coins[row] < mass / acc or prob >= single:
                path.append(child)
                refused = {}
                break
            refused[token] = float(prob)
        else:
            break
    return path, refused


def assert_last_token(
    case: VerifyCase, request: int, token: int, path: list[int], refused: dict[int, float]
) -> None:
    """`token` is where the final coin falls in what is left, up to float32's rounding."""
    row = rows_of(case, request)[path[-1]]
    mass = torch.where(case.probs[row] > 0, case.probs[row], 0.0).double()
    left = mass.clone()
    left[list(refused)] = 0.0
    left = left if left.sum() > 0 else mass
    if left.sum() == 0:
        assert token == 0
        return
    running = left.cumsum(0)
    place = float(case.final_coins[request]) * float(running[-1])
    slack = 3e-6 * float(running[-1])
    assert left[token] > 0
    assert float(running[token]) + slack > place
    assert float(running[token] - left[token]) - slack <= place
