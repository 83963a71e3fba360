"""Draft steps of a drafter that keeps two branches of each request, one after the other, against
attention over each row's branch written out."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.registry import ATTENTION_BACKENDS

NUM_STEPS, TOP_K = 3, 2
CONTEXTS = (13, 40, 1, 70)  # tokens with KV before the first draft
LAST_STEPS = (2, 0, 2, 1)  # in which each request still drafts
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
WINDOWS = (None, 2)


class DraftChain:
    """The requests, and the drafts that they have fed.

    Attributes:
        branches: of each request, the branches that it keeps, each as numbers of drafts of the
            request in the order of depth. Draft n of a request is at place context + n.
    """

    def __init__(self, name: str, device: str, page_size: int) -> None:
        self.device, self.random = device, random.Random(page_size)
        self.generator = torch.Generator().manual_seed(0)
        width = max(CONTEXTS) + NUM_STEPS * TOP_K
        width += -width % page_size
        num_rows = len(CONTEXTS)
        self.table = ReqToTokenPool(num_rows, width, device)
        num_pages = num_rows * width // page_size
        self.pool = MHATokenToKVPool(
            num_pages * page_size,
            page_size,
            len(WINDOWS),
            NUM_KV_HEADS,
            HEAD_DIM,
            torch.float32,
            device,
        )
        pages = torch.randperm(num_pages, generator=self.generator) + 1
        slots = pages[:, None] * page_size + torch.arange(page_size)
        self.table.req_to_token[:num_rows] = slots.view(num_rows, width)
        for kv in self.pool.kv:
            kv[page_size:] = float("nan")
            for row, context in enumerate(CONTEXTS):
                own = self.table.req_to_token[row, :context].long()
                kv[own] = self.values(context, kv.shape[1])
        self.backend = ATTENTION_BACKENDS.load(name)(self.table, self.pool, NUM_HEADS, WINDOWS)
        self.branches: list[list[list[int]]] = [[[]] for _ in CONTEXTS]

    def values(self, count: int, heads: int) -> torch.Tensor:
        found = torch.randn(count, heads, HEAD_DIM, generator=self.generator)
        return found.to(self.device)

    def step(self, index: int) -> float:
        """Feeds a row for each branch that goes on; returns the largest error."""
        fed = [TOP_K if index <= last else 0 for last in LAST_STEPS]
        for request, count in enumerate(fed):
            first = index * TOP_K
            parents = [self.random.choice(self.branches[request]) for _ in range(count)]
            self.branches[request] = [[*path, first + i] for i, path in enumerate(parents)]
        rows = [(r, branch) for r, count in enumerate(fed) for branch in self.branches[r][:count]]
        places = [CONTEXTS[request] + branch[-1] for request, branch in rows]
        slots = [self.table.req_to_token[r, at] for (r, _), at in zip(rows, places, strict=True)]
        lens = [CONTEXTS[r] + TOP_K * min(index, last) + TOP_K for r, last in enumerate(LAST_STEPS)]
        padding = [0] * (TOP_K * len(CONTEXTS) - len(rows))
        batch = ForwardBatch(
            input_ids=self.integers([0] * (len(rows) + len(padding))),
            positions=self.integers([CONTEXTS[r] + len(b) - 1 for r, b in rows] + padding),
            slots=self.integers([int(slot) for slot in slots] + padding),
            rows=self.integers(range(len(CONTEXTS))),
            q_lens=[TOP_K] * len(CONTEXTS),
            kv_lens=self.integers(lens),
            kv_len_upper_bounds=[context + TOP_K * (index + 1) for context in CONTEXTS],
            ancestors=self.integers([sum(1 << draft for draft in b) for _, b in rows] + padding),
            tree_starts=self.integers(CONTEXTS),
            q_starts=self.integers([sum(fed[:request]) for request in range(len(fed) + 1)]),
        )
        self.backend.plan(batch)
        worst = 0.0
        for layer, kv in enumerate(self.pool.kv):
            kv[batch.slots[: len(rows)]] = self.values(len(rows), kv.shape[1])
            q = self.values(len(batch.positions), NUM_HEADS)
            out = self.backend.forward(layer, q)
            for row, (request, branch) in enumerate(rows):
                right = self.written_out(layer, q[row], request, branch)
                worst = max(worst, (out[row] - right).abs().nan_to_num(nan=torch.inf).max().item())
        return worst

    def integers(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)

    def written_out(
        self, layer: int, q: torch.Tensor, request: int, branch: list[int]
    ) -> torch.Tensor:
        """Attention of one row over its request's context and its own branch, in order of depth,
        of which a window leaves the last ones."""
        context = CONTEXTS[request]
        places = [*range(context), *(context + draft for draft in branch)]
        places = places[-(WINDOWS[layer] or len(places)) :]
        kv = self.pool.kv[layer][self.table.req_to_token[request, places].long()].double()
        k, v = kv.chunk(2, dim=1)
        grouped = q.double().unflatten(0, (NUM_KV_HEADS, -1))
        weights = (torch.einsum("hgd,nhd->hgn", grouped, k) / HEAD_DIM**0.5).softmax(-1)
        return torch.einsum("hgn,nhd->hgd", weights, v).flatten()


def draft_chain_error(name: str, device: str, page_size: int) -> float:
    """The largest error of backend `name` over all draft steps, rows and windows."""
    chain = DraftChain(name, device, page_size)
    return max(chain.step(index) for index in range(NUM_STEPS))
