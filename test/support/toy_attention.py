"""An attention backend that only tests know: request by request and row by row, each over the list
of keys that it sees. Slow, and written from the contract alone; float64 inside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

PLACE = f"{__name__}:ToyAttention"  # for a registry


class ToyAttention:
    """See `AttentionBackend`. A window counts positions, which in trees are those of depths."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        assert scores == PLAIN
        self._table, self._kv_pool, self._windows = req_to_token_pool, kv_pool, tuple(windows)
        self._seen: dict[int | None, list[list[int]]] = {}

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32}),
            page_sizes=None,
            graph=GraphSupport.NEVER,
            tree_masks=True,
            captures_trees=True,
            reads_q_starts=False,
            captures_plans=False,
            reads_kv_starts=False,
        )

    def plan(self, batch: ForwardBatch) -> None:
        """Writes out the slots that each row sees, for each window of the model."""
        assert batch.tree_starts is None, "Drafters of tests feed a tree in one step."
        starts = [0, *accumulate(batch.q_lens)]
        if batch.q_starts is not None:
            starts = batch.q_starts.tolist()
        positions, kv_lens = batch.positions.tolist(), batch.kv_lens.tolist()
        masks = [-1] * starts[-1] if batch.ancestors is None else batch.ancestors.tolist()
        self._seen = {window: [] for window in self._windows}
        for request, row in enumerate(batch.rows.tolist()):
            first, end = starts[request : request + 2]
            num_before = kv_lens[request] - (end - first)
            slots = self._table.req_to_token[row, : kv_lens[request]].tolist()
            assert slots[num_before:] == batch.slots[first:end].tolist(), "KV goes elsewhere."
            of_keys = [*range(num_before), *positions[first:end]]
            for place in range(first, end):
                keys = [*range(num_before)]
                keys += [num_before + j for j in range(place - first + 1) if masks[place] >> j & 1]
                for window, seen in self._seen.items():
                    least = 0 if window is None else positions[place] - window + 1
                    seen.append([slots[key] for key in keys if of_keys[key] >= least])

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        kv = self._kv_pool.kv[layer].double()
        num_kv_heads = kv.shape[1] // 2
        out = torch.zeros(q.shape, dtype=torch.float64)
        for place, slots in enumerate(self._seen[self._windows[layer]]):
            k, v = kv[slots].chunk(2, dim=1)
            heads = q[place].double().unflatten(0, (num_kv_heads, -1))
            scores = torch.einsum("hgd,nhd->hgn", heads, k) / q.shape[-1] ** 0.5
            out[place] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
        return out.to(q.dtype).flatten(1)
