"""Steps of one row per request that share prefixes, by the Triton backend, against attention in
float64 over the keys of each row's slots.

As a program it runs all cases in float32 and prints a line of JSON per case; see
`attention_cases.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from interpreted import asked
from sglang.srt.layers.forward_batch import DECODE, ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool, SharedPrefix
from sglang.srt.registry import ATTENTION_BACKENDS


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """A step of requests in random order at random pages.

    Attributes:
        groups: (tokens of a prefix, in whole pages; requests that have it), 0: no prefix.
        own_lens: tokens after the prefix, for the requests in turn.
        windows: sliding window of each layer.
        graph_spare: requests of padding, where the step is planned as a graph's; None: without one.
        earlier: groups of a step that the same backend plans before; empty: none.
    """

    groups: Sequence[tuple[int, int]]
    own_lens: Sequence[int] = (1, 40, 17)
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 16
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    graph_spare: int | None = None
    earlier: Sequence[tuple[int, int]] = ()


# In the interpreter a tile has 32 rows, so 8 requests with four query heads per KV head.
SHARED_CASES = {
    "a prefix of one request": SharedCase(groups=[(16, 1), (0, 1)]),
    "a full tile, one more than a tile, and no prefix": SharedCase(
        groups=[(32, 8), (16, 9), (0, 1)]
    ),
    "pages of 1, edges of tiles of KV": SharedCase(
        groups=[(33, 3), (0, 2), (7, 2), (48, 2)], page_size=1, num_kv_heads=2, num_heads=8
    ),
    "a prefix that many programs share": SharedCase(groups=[(200, 2)], page_size=1),
    "one query head per KV head": SharedCase(groups=[(48, 3), (16, 2)], num_heads=1),
    "eight query heads per KV head": SharedCase(groups=[(32, 5)], num_heads=8),
    "three query heads per KV head": SharedCase(groups=[(32, 2)], num_heads=3, head_dim=24),
    "a window in one layer": SharedCase(groups=[(48, 2)], windows=(None, 20)),
    "long after the prefix, in splits": SharedCase(groups=[(32, 2)], own_lens=(150, 3)),
    "a graph without prefixes": SharedCase(groups=[(0, 3)], graph_spare=1),
    "a graph with padding, whose step before had others": SharedCase(
        groups=[(16, 3), (0, 2)], graph_spare=2, earlier=[(32, 3), (48, 2)]
    ),
}


class PlacedStep:
    """A step's memory and inputs; KV that no request has is NaN.

    Attributes:
        slots: of each request, in the order of the batch.
    """

    def __init__(self, case: SharedCase, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.case, self.dtype, self.device = case, dtype, device
        size = case.page_size
        members = [group for group, (_, count) in enumerate(case.groups) for _ in range(count)]
        own = [case.own_lens[index % len(case.own_lens)] for index in range(len(members))]
        num_rows = len(members) + (case.graph_spare or 0) + 2
        longest = max(length for length, _ in case.groups) + max(own)
        num_pages = sum(length for length, _ in case.groups) + sum(own) + len(own) * size
        pages = list(range(1, num_pages // size + 2))
        self._random.shuffle(pages)

        def take(length: int) -> list[int]:
            found = [pages.pop() for _ in range(-(-length // size))]
            return [page * size + offset for page in found for offset in range(size)][:length]

        prefixes = [take(length) for length, _ in case.groups]
        order = self._random.sample(range(len(members)), len(members))
        self.rows = self._random.sample(range(num_rows), len(members))
        self.table = ReqToTokenPool(num_rows, longest + 3, device)
        self.pool = MHATokenToKVPool(
            num_pages + 2 * size, size, len(case.windows), case.num_kv_heads, case.head_dim, dtype,
            device,
        )  # fmt: skip
        for kv in self.pool.kv:
            kv[size:] = float("nan")
        self.slots = []
        groups: list[list[int]] = [[] for _ in case.groups]
        for request, index in enumerate(order):
            groups[members[index]].append(request)
            slots = prefixes[members[index]] + take(own[index])
            self.slots.append(slots)
            self.table.write([[self.rows[request]] * len(slots), list(range(len(slots))), slots])
        for kv in self.pool.kv:
            used = sorted({slot for slots in self.slots for slot in slots})
            kv[used] = self._values(len(used), kv.shape[1]).to(kv)
        self.prefixes = [
            SharedPrefix(length, tuple(found), tuple(self.rows[request] for request in found))
            for (length, _), found in zip(case.groups, groups, strict=True)
            if length
        ]
        self.q = [
            self._values(len(self.slots) + (case.graph_spare or 0), case.num_heads).to(
                device, dtype
            )
            for _ in case.windows
        ]

    def _values(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.case.head_dim, generator=self._generator)

    def batch(self) -> ForwardBatch:
        spare, lens = self.case.graph_spare, [len(slots) for slots in self.slots]
        count = len(lens) + (spare or 0)
        numbers = torch.zeros(count, dtype=torch.int64, device=self.device)
        rows, kv_lens = numbers.clone(), numbers + 1
        rows[: len(lens)] = torch.tensor(self.rows)
        kv_lens[: len(lens)] = torch.tensor(lens)
        return ForwardBatch(
            input_ids=numbers,
            positions=kv_lens - 1,
            slots=numbers,
            rows=rows,
            q_lens=[1] * count,
            kv_lens=kv_lens,
            kv_len_upper_bounds=[*lens, *[1] * (spare or 0)],
            graph_key=None if spare is None else GraphKey(DECODE, count, 1, count, shares_kv=True),
            shared_prefixes=self.prefixes,
        )

    def expected(self, layer: int) -> torch.Tensor:
        """[R, num_heads * head_dim] float64."""
        kv, window = self.pool.kv[layer].double(), self.case.windows[layer]
        heads = self.case.num_kv_heads
        found = []
        for request, slots in enumerate(self.slots):
            seen = slots if window is None else slots[-window:]
            k, v = kv[seen, :heads], kv[seen, heads:]
            q = self.q[layer][request].double().view(heads, -1, self.case.head_dim)
            scores = torch.einsum("hgd,nhd->hgn", q, k) * self.case.head_dim**-0.5
            found.append(torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten())
        return torch.stack(found)


def shared_error(case: SharedCase, device: str, dtype: torch.dtype) -> float:
    """The largest error of any layer."""
    step = PlacedStep(case, device, dtype)
    backend = ATTENTION_BACKENDS.load("triton")(step.table, step.pool, case.num_heads, case.windows)
    if case.earlier:
        earlier = PlacedStep(replace(case, groups=case.earlier), device, dtype, seed=1)
        backend.plan(replace(step.batch(), shared_prefixes=earlier.prefixes))
    backend.plan(step.batch())
    errors = []
    for layer, q in enumerate(step.q):
        found = backend.forward(layer, q)[: len(step.slots)].double()
        error = (found - step.expected(layer)).abs().max().item()
        errors.append(float("inf") if error != error else error)
    return max(errors)


def main() -> None:
    for name, case in asked(SHARED_CASES).items():
        print(json.dumps([name, shared_error(case, "cpu", torch.float32)]), flush=True)


if __name__ == "__main__":
    main()
