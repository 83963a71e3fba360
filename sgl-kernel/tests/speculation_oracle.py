"""Says what confirm_drafts and move_kept_kv may return, row by row, and makes the inputs that tests
share."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from sgl_kernel import ConfirmedDrafts, KVAddresses

# Tokens that differ in their high or their low bits alone.
_TOKENS = (5, 5 + 2**32, -(2**63), 6)


@dataclass(frozen=True, slots=True)
class DraftCase:
    """Arguments of one confirm_drafts call."""

    tokens: torch.Tensor
    targets: torch.Tensor
    parents: torch.Tensor | None
    starts: torch.Tensor
    num_rows: torch.Tensor
    max_rows: int
    target_starts: torch.Tensor | None = None

    def arguments(
        self,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        int,
        torch.Tensor | None,
    ]:
        """In the order of confirm_drafts."""
        return (
            *(self.tokens, self.targets, self.parents, self.starts, self.num_rows),
            *(self.max_rows, self.target_starts),
        )

    def to(self, device: str) -> DraftCase:
        names = ("tokens", "targets", "parents", "starts", "num_rows", "target_starts")
        values = {name: getattr(self, name) for name in names}
        moved = {name: value.to(device) for name, value in values.items() if value is not None}
        return replace(self, **moved)


def random_drafts(
    num_requests: int, max_rows: int, seed: int, has_tree: bool = True, reads_all: bool = True
) -> DraftCase:
    """Ragged requests, each with up to max_rows pending rows and a few others after them.

    Two thirds of the drafts hold what their parent drew. Some parents are invalid, some siblings
    hold the same token, and rows after the pending ones follow pending rows. Every fifth request
    has no pending row.

    Args:
        reads_all: the targets are those of all packed rows; else those of pending rows alone, in
            another order of requests and with gaps.
    """
    generator = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    drawn: list[list[int]] = []
    starts, num_rows = [0], []
    for request in range(num_requests):
        count = 0 if request % 5 == 4 else generator.randint(1, max_rows)
        behind = generator.randint(0 if count else 1, 3)
        own_targets = [generator.choice(_TOKENS) for _ in range(count + behind)]
        for row in range(count + behind):
            near = max(0, row - generator.choice([1, 2, 6, max_rows]))
            parent = generator.randint(near, max(row - 1, 0)) if has_tree else row - 1
            is_confirmed = generator.random() < 0.67
            token = own_targets[max(parent, 0)] if is_confirmed else generator.choice(_TOKENS)
            if has_tree and generator.random() < 0.05:
                parent = generator.choice([-1, row, row + 1, count + 2, -(2**31), 2**31 - 1])
            tokens.append(token)
            parents.append(parent)
        drawn.append(own_targets)
        num_rows.append(count)
        starts.append(len(tokens))
    tokens += [generator.choice(_TOKENS) for _ in range(7)]  # padding of the step
    parents += [0] * 7
    case = DraftCase(
        tokens=torch.tensor(tokens),
        targets=torch.tensor([*(token for own in drawn for token in own), *tokens[-7:]]),
        parents=torch.tensor(parents, dtype=torch.int32) if has_tree else None,
        starts=torch.tensor(starts),
        num_rows=torch.tensor(num_rows),
        max_rows=max_rows,
    )
    return case if reads_all else _with_targets_apart(case, drawn, generator)


def _with_targets_apart(
    case: DraftCase, drawn: list[list[int]], generator: random.Random
) -> DraftCase:
    order = list(range(len(drawn)))
    generator.shuffle(order)
    targets: list[int] = []
    target_starts = [0] * len(drawn)
    for request in order:
        targets += [generator.choice(_TOKENS)] * generator.randint(0, 2)
        target_starts[request] = len(targets)
        targets += drawn[request][: int(case.num_rows[request])]
    return replace(
        case,
        targets=torch.tensor([*targets, 0]),
        target_starts=torch.tensor(target_starts),
    )


def chain_as_tree(case: DraftCase) -> DraftCase:
    """The same chains, with their parents written down."""
    parents = torch.arange(len(case.tokens))
    for start, end in zip(case.starts[:-1].tolist(), case.starts[1:].tolist(), strict=True):
        parents[start:end] -= start + 1
    return replace(case, parents=parents.to(torch.int32))


def pending_count(case: DraftCase, request: int) -> int:
    """A request's pending rows after everything that is out of its range has been cut off."""
    start, end = case.starts[request : request + 2].tolist()
    target_start = start if case.target_starts is None else int(case.target_starts[request])
    if start < 0 or target_start < 0:
        return 0
    most = min(end, len(case.tokens)) - start, len(case.targets) - target_start, case.max_rows
    return max(min(int(case.num_rows[request]), *most), 0)


def expected_path(case: DraftCase, request: int) -> tuple[list[int], int]:
    """The kept rows of a request and the token after them, step by step."""
    count = pending_count(case, request)
    if count == 0:
        return [], 0
    start = int(case.starts[request])
    target_start = start if case.target_starts is None else int(case.target_starts[request])
    tokens = case.tokens[start : start + count].tolist()
    targets = case.targets[target_start : target_start + count].tolist()
    parents = list(range(-1, count - 1))
    if case.parents is not None:
        parents = case.parents[start : start + count].tolist()
    path = [0]
    while True:
        last = path[-1]
        matches = [r for r in range(last + 1, count) if parents[r] == last]
        matches = [r for r in matches if tokens[r] == targets[last]]
        if not matches:
            return path, targets[last]
        path.append(matches[0])


def assert_confirmed(case: DraftCase, result: ConfirmedDrafts) -> None:
    """The result on any device is what `expected_path` says."""
    num_requests = len(case.num_rows)
    assert [part.dtype for part in result] == [torch.int64, torch.int32, torch.int64]
    paths, next_tokens = [], []
    for request in range(num_requests):
        path, next_token = expected_path(case, request)
        paths.append(path)
        next_tokens.append(next_token)
    padded = [path + [-1] * (case.max_rows - len(path)) for path in paths]
    assert result.path.tolist() == padded
    assert result.num_confirmed.tolist() == [max(len(path) - 1, 0) for path in paths]
    assert result.next_token.tolist() == next_tokens


@dataclass(frozen=True, slots=True)
class MoveCase:
    """Arguments of one move_kept_kv call."""

    kv: KVAddresses
    page_table: torch.Tensor
    table_rows: torch.Tensor
    committed: torch.Tensor
    path: torch.Tensor
    num_confirmed: torch.Tensor

    def arguments(self) -> tuple[KVAddresses, *tuple[torch.Tensor, ...]]:
        """In the order of move_kept_kv."""
        vectors = (self.table_rows, self.committed, self.path, self.num_confirmed)
        return self.kv, self.page_table, *vectors

    def to(self, device: str) -> MoveCase:
        """A copy on a device; tensors that are not aligned stay so."""
        tensors = []
        for tensor in self.kv.tensors:
            lead = tensor.storage_offset()
            storage = torch.zeros(lead + tensor.numel(), dtype=tensor.dtype, device=device)
            tensors.append(storage[lead:].view(tensor.shape).copy_(tensor))
        vectors = (tensor.to(device) for tensor in self.arguments()[1:])
        return MoveCase(KVAddresses(tensors), *vectors)


# Shapes of a slot, of target and draft pools. Their bytes are multiples of 16, 4 or 2, and the last
# has more of them than a block has threads.
SLOT_SHAPES = (
    ((4, 8), torch.bfloat16),
    ((2, 20), torch.float32),
    ((2, 5), torch.float32),
    ((2, 1), torch.float16),
    ((3, 101), torch.float16),
)


def random_pools(num_slots: int, seed: int) -> list[torch.Tensor]:
    """Two layers of each of SLOT_SHAPES, of random bytes; every third tensor is not aligned."""
    generator = torch.Generator().manual_seed(seed)
    pools = []
    for i, (shape, dtype) in enumerate(SLOT_SHAPES * 2):
        count = num_slots * shape[0] * shape[1]
        lead = 2 if i % 3 == 2 else 0
        values = torch.randint(1, 120, (lead + count,), generator=generator).to(dtype)
        pools.append(values[lead:].view(num_slots, *shape))
    return pools


def random_moves(
    num_requests: int, max_rows: int, page_size: int, seed: int, pages: int | None = None
) -> MoveCase:
    """Requests whose pages lie anywhere; each keeps a random path, some of them row 0 alone."""
    generator = random.Random(seed)
    pages = pages or -(-(40 + max_rows) // page_size)
    num_table_rows, width = num_requests + 3, pages * page_size
    numbers = list(range(1, 1 + num_table_rows * pages))
    generator.shuffle(numbers)
    first_slots = torch.tensor(numbers, dtype=torch.int32).view(num_table_rows, pages) * page_size
    offsets = torch.arange(page_size, dtype=torch.int32)
    page_table = (first_slots[:, :, None] + offsets).view(num_table_rows, width)
    path = torch.full((num_requests, max_rows), -1, dtype=torch.int32)
    num_confirmed = torch.zeros(num_requests, dtype=torch.int64)
    for request in range(num_requests):
        most = generator.choice([0, 1, 3, max_rows - 1])
        kept = sorted(generator.sample(range(1, max_rows), min(most, max_rows - 1)))
        if generator.random() < 0.5:  # the tree begins as a chain that is kept
            prefix = list(range(1, len(kept) // 2 + 1))
            kept = prefix + [row for row in kept if row > len(prefix)]
        kept = kept[: generator.randint(0, len(kept))]
        path[request, : 1 + len(kept)] = torch.tensor([0, *kept], dtype=torch.int32)
        num_confirmed[request] = len(kept)
    return MoveCase(
        kv=KVAddresses(random_pools((1 + num_table_rows * pages) * page_size, seed)),
        page_table=page_table,
        table_rows=torch.tensor(generator.sample(range(num_table_rows), num_requests)),
        committed=torch.tensor([generator.randint(0, 40) for _ in range(num_requests)]),
        path=path,
        num_confirmed=num_confirmed,
    )


def expected_kv(case: MoveCase) -> list[torch.Tensor]:
    """The pools after the moves, slot by slot from a copy of what they held."""
    results = []
    width = case.page_table.shape[1]
    for tensor in case.kv.tensors:
        before, after = tensor.clone(), tensor.clone()
        for request, row in enumerate(case.table_rows.tolist()):
            first, kept = int(case.committed[request]), case.path[request].tolist()
            for k in range(1, min(int(case.num_confirmed[request]) + 1, len(kept))):
                positions = (first + kept[k], first + k)
                if not 0 <= row < len(case.page_table) or first < 0 or positions[0] >= width:
                    continue
                origin, place = (int(case.page_table[row, p]) for p in positions)
                if 0 <= origin < len(tensor) and 0 <= place < len(tensor):
                    after[place] = before[origin]
        results.append(after)
    return results
