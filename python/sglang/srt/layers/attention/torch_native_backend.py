"""Paged attention in plain torch: the CPU runtime, and the oracle for every other backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.attention.gathered_kv import GatheredKV
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

MAX_MASK_ENTRIES = 1 << 24  # bounds the temporary memory of one group (64 MiB in float32)


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests that feed the same number of rows, attended in one call.

    Attributes:
        tokens: [N, q] int64; their rows among the T of the batch, or None for all in order.
        positions: [N, q] int64; places among the request's tokens with KV that is seen.
        kv_lens: [N] int64; number of these tokens.
        slots: [N, L] int64; KV slots, the dummy slot past a request's end.
        masks: for each distinct window of the model, [N, 1, q, L] bool: whether a query sees a key.
    """

    tokens: torch.Tensor | None
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    masks: tuple[torch.Tensor, ...]


class TorchNativeBackend:
    """Groups requests by rows fed, gathers their KV and calls scaled_dot_product_attention.

    The query heads that share a KV head are laid out as further query rows, so K and V are never
    repeated.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        self._scores = scores
        self._windows = tuple(dict.fromkeys(windows))
        self._mask_of_layer = [self._windows.index(window) for window in windows]
        self._table = req_to_token_pool.req_to_token
        self._kv_pool, self._kv_starts = kv_pool, kv_pool.kv_starts
        self._groups: list[_Group] = []
        self._num_tokens = 0
        self._scratch = kv_pool.kv[0][:0]
        self._gathered = GatheredKV(kv_pool.kv)

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            page_sizes=None,
            graph=GraphSupport.NEVER,
            tree_masks=True,
            captures_trees=False,
            reads_q_starts=False,
            captures_plans=False,
            reads_kv_starts=True,
            folds_rows=True,
        )

    def plan(self, batch: ForwardBatch) -> None:
        if batch.q_starts is not None:
            batch = _unpacked(batch, batch.q_starts.tolist())
        self._num_tokens = batch.positions.shape[0]
        members: dict[int, list[int]] = {}
        for index, q_len in enumerate(batch.q_lens):
            if q_len > 0:
                members.setdefault(q_len, []).append(index)
        is_uniform = len(set(batch.q_lens)) == 1 == len(members) and batch.ancestors is None
        if is_uniform and self._fits(batch, *next(iter(members.items()))):
            group = self._make_group(batch, batch.q_lens[0], None)
            self._groups = [group]
            self._gathered.plan(group.slots, group.positions, group.kv_lens)
            return
        self._groups = []
        self._gathered.forget()
        for q_len, indices in members.items():
            for part in self._split(batch, q_len, indices):
                self._groups.append(self._make_group(batch, q_len, part))

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if len(q) > self._num_tokens:
            out = self.forward(layer, q[: self._num_tokens])
            return F.pad(out, (0, 0, 0, len(q) - len(out)))
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            kv = self._gathered.gather(layer)
            return self._attend(layer, self._groups[0], q, kv).reshape(len(q), -1)
        kv = self._kv_pool.kv[layer]
        out = q.new_empty(q.shape)
        for group in self._groups:
            assert group.tokens is not None
            index = group.tokens.flatten()
            out[index] = self._attend(layer, group, q[index], self._gather(kv, group.slots))
        return out.flatten(1)

    def _attend(self, layer: int, group: _Group, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [N * q, num_heads, head_dim], kv [N, >= L, 2 * num_kv_heads, head_dim] -> as q."""
        num, queries = group.positions.shape
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = kv.shape[2] // 2
        share = num_heads // num_kv_heads
        k, v = kv[:, : group.slots.shape[1]].transpose(1, 2).chunk(2, dim=1)
        # [N, queries, kv_heads, share, D] -> [N, kv_heads, queries * share, D]
        grouped = q.reshape(num, queries, num_kv_heads, share, head_dim).transpose(1, 2)
        grouped = grouped.reshape(num, num_kv_heads, queries * share, head_dim)
        mask = group.masks[self._mask_of_layer[layer]]
        if queries > 1:
            mask = mask.repeat_interleave(share, dim=2)
        if self._scores.softcap is None:
            scale = self._scores.scale
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        else:
            out = _attend_capped(grouped, k, v, mask, self._scores)
        out = out.view(num, num_kv_heads, queries, share, head_dim).transpose(1, 2)
        return out.reshape(num * queries, num_heads, head_dim)

    def _gather(self, kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Gathers K and V of `slots` in a buffer that all layers and steps share: fresh memory of
        this size would cost more than the copy."""
        count = slots.numel()
        if self._scratch.shape[0] < count:
            self._scratch = kv.new_empty((count + count // 4, *kv.shape[1:]))
        torch.index_select(kv, 0, slots.flatten(), out=self._scratch[:count])
        return self._scratch[:count].view(*slots.shape, *kv.shape[1:])

    def _make_group(self, batch: ForwardBatch, q_len: int, part: list[int] | None) -> _Group:
        """Makes the group of the requests `part` (None: all), which feed q_len rows each."""
        device = batch.positions.device
        if part is None:
            length = max(batch.kv_len_upper_bounds)
            rows, kv_lens, tokens = batch.rows, batch.kv_lens, None
            positions = batch.positions.view(-1, q_len)
        else:
            length = max(batch.kv_len_upper_bounds[index] for index in part)
            chosen = torch.tensor(part, device=device)
            starts = torch.tensor([0, *batch.q_lens], device=device).cumsum(0)[chosen]
            own = torch.arange(q_len, device=device)
            tokens = starts[:, None] + own
            rows, kv_lens = batch.rows[chosen], batch.kv_lens[chosen]
            positions = kv_lens[:, None] - q_len + own
        first = torch.zeros_like(rows) if self._kv_starts is None else self._kv_starts[rows]
        kv_lens, positions = kv_lens - first, positions - first[:, None]
        columns = torch.arange(length, device=device)
        valid = columns < kv_lens[:, None]
        slots = self._slots(rows, first, length) * valid
        tree = None
        if batch.ancestors is not None:
            starts = kv_lens - q_len
            if batch.tree_starts is not None:
                starts = batch.tree_starts[chosen] - first
            starts = torch.where(kv_lens - starts <= MAX_TREE_ROWS, starts, kv_lens)
            tree = _tree_mask(batch.ancestors[tokens], columns - starts[:, None])
        masks = self._make_masks(columns, positions, tree)
        return _Group(tokens, positions, kv_lens, slots, masks)

    def _slots(self, rows: torch.Tensor, first: torch.Tensor, length: int) -> torch.Tensor:
        """[N, length] int64; slots of rows [N] of the table from columns first [N] on, arbitrary
        past their ends."""
        if self._kv_starts is None:
            return self._table[rows, :length].to(torch.int64)
        columns = first[:, None] + torch.arange(length, device=rows.device)
        found = self._table[rows[:, None], columns.clamp(max=self._table.shape[1] - 1)]
        return found.to(torch.int64)

    def _make_masks(
        self, columns: torch.Tensor, positions: torch.Tensor, tree: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Makes masks over columns [L] for queries at positions [N, q], within `tree` [N, 1, q, L]
        bool. Windows that cut nothing off share one object."""
        at = positions[:, None, :, None]
        if tree is None:
            seen, past = columns <= at, at
        else:  # in place of a position, the number of keys seen that do not come after it
            seen = (columns <= at) & tree
            columns = seen.cumsum(-1, dtype=torch.int32)
            past = columns[..., -1:]
        return tuple(
            seen if window is None or window >= seen.shape[-1] else seen & (columns > past - window)
            for window in self._windows
        )

    def _fits(self, batch: ForwardBatch, q_len: int, indices: list[int]) -> bool:
        length = max(batch.kv_len_upper_bounds)
        return len(indices) * q_len * length <= MAX_MASK_ENTRIES

    def _split(self, batch: ForwardBatch, q_len: int, indices: list[int]) -> list[list[int]]:
        """Divides `indices` into parts whose masks stay within MAX_MASK_ENTRIES (at least one
        request each)."""
        length = max(batch.kv_len_upper_bounds[index] for index in indices)
        size = max(1, MAX_MASK_ENTRIES // (q_len * length))
        return [indices[start : start + size] for start in range(0, len(indices), size)]


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, form: ScoreForm
) -> torch.Tensor:
    """Attention with a bound on scores, which are float32.

    Args:
        q: [N, kv_heads, Q, D].
        k, v: [N, kv_heads, L, D].
        mask: [N, 1, Q, L] bool.
    """
    assert form.softcap is not None
    scores = (q @ k.transpose(-1, -2)).float() * form.scale_of(q.shape[-1])
    scores = form.softcap * torch.tanh(scores / form.softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(v.dtype) @ v


def _unpacked(batch: ForwardBatch, starts: list[int]) -> ForwardBatch:
    """Returns the same step with host lengths from `q_starts` and without padding."""
    q_lens = [end - start for start, end in pairwise(starts)]
    assert 0 == starts[0] <= starts[-1] <= batch.positions.shape[0], starts
    assert all(0 <= q_len <= most for q_len, most in zip(q_lens, batch.q_lens, strict=True))
    prompts = [index for index, most in enumerate(batch.q_lens) if most > MAX_TREE_ROWS]
    end = max(prompts, default=-1) + 1
    assert q_lens[:end] == batch.q_lens[:end], "Requests of known length come first."
    rows = slice(starts[-1])
    ancestors = None if batch.ancestors is None else batch.ancestors[rows]
    positions = batch.positions[rows]
    return replace(batch, positions=positions, q_lens=q_lens, ancestors=ancestors, q_starts=None)


def _tree_mask(ancestors: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the keys that `ancestors` [N, q] int64 let a query see.

    Args:
        row_of: [N, L] int64; the step's row that each key belongs to, negative for none.

    Returns:
        [N, 1, q, L] bool.
    """
    numbers = torch.arange(MAX_TREE_ROWS, device=ancestors.device)
    bits = ancestors[:, :, None] >> numbers & 1 == 1
    index = row_of.clamp(0, MAX_TREE_ROWS - 1)[:, None].expand(-1, ancestors.shape[1], -1)
    return (bits.gather(2, index) | (row_of < 0)[:, None])[:, None]
