"""Random inputs of attention benchmarks, and what attention of some rows is to give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.layers.attention.triton_ops.kernels import Paged
from sglang.srt.layers.forward_batch import DECODE, ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

MAX_ERROR = 2e-2  # of the norm of a result; what bfloat16 rounds is less than 1e-2
SAMPLED_ROWS = 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention, and where they are computed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """K and V of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def queries(self, num_rows: int) -> torch.Tensor:
        """[num_rows, num_heads, head_dim], normal."""
        shape = (num_rows, self.num_heads, self.head_dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def pool(self, num_slots: int, num_layers: int) -> MHATokenToKVPool:
        """Normal values in pages of one token."""
        pool = MHATokenToKVPool(
            num_slots, 1, num_layers, self.num_kv_heads, self.head_dim, self.dtype, str(self.device)
        )
        for kv in pool.kv:
            kv.normal_()
        return pool


class PromptShape(NamedTuple):
    """`num_rows` rows of a prompt of which `prefix` tokens have KV already."""

    num_rows: int
    prefix: int

    @property
    def kv_len(self) -> int:
        return self.prefix + self.num_rows

    def flop(self, heads: Heads) -> int:
        """Floating-point operations of the two products over all pairs of a row and a token that
        it sees."""
        pairs = self.num_rows * self.prefix + self.num_rows * (self.num_rows + 1) // 2
        return 4 * heads.num_heads * heads.head_dim * pairs


class PromptInputs:
    """The rows of one prompt, and its KV in random slots of a pool of several layers.

    Args:
        pool: of more slots than the prompt has tokens.

    Attributes:
        slots: [kv_len] int64.
        q: [num_rows, num_heads, head_dim].
        paged: one row of a page table.
    """

    def __init__(self, heads: Heads, pool: MHATokenToKVPool, shape: PromptShape) -> None:
        self.heads, self.pool, self.shape = heads, pool, shape
        device, num_slots = heads.device, pool.kv[0].shape[0] - 1
        self.slots = 1 + torch.randperm(num_slots, device=device)[: shape.kv_len]
        self.q = heads.queries(shape.num_rows)
        self.paged = Paged(
            table=self.slots.to(torch.int32)[None],
            rows=torch.zeros(1, dtype=torch.int64, device=device),
            kv_lens=torch.full((1,), shape.kv_len, device=device),
        )

    def error(self, out: torch.Tensor, layer: int) -> float:
        """Of some rows of a result [num_rows, num_heads, head_dim], as a share of the norm."""
        num_rows = self.shape.num_rows
        rows = torch.linspace(0, num_rows - 1, min(num_rows, SAMPLED_ROWS)).long().to(out.device)
        kv = self.pool.kv[layer][self.slots]
        return relative_error(out[rows], attend(self.q[rows], kv, self.shape.prefix + rows))


class DecodeShape(NamedTuple):
    """Requests that feed one row each, over the same number of tokens with KV."""

    num_requests: int
    kv_len: int

    def kv_bytes(self, heads: Heads) -> int:
        """That a layer reads."""
        return self.num_requests * self.kv_len * heads.kv_bytes


class DecodeInputs:
    """Steps of decodes of one shape. Those of a set have slots of their own, in random order, so a
    set that has not been read for long is in no cache.

    Args:
        context_len: columns of the page table. Who plans a graph knows no other length.

    Attributes:
        q: [num_requests, num_heads, head_dim].
        batches: one step for each set, as for the graph of decodes.
    """

    def __init__(self, heads: Heads, shape: DecodeShape, context_len: int, num_sets: int) -> None:
        self.heads, self.shape = heads, shape
        count, kv_len = shape
        num_rows, device = num_sets * count, heads.device
        num_slots = num_rows * kv_len
        self.pool = heads.pool(num_slots, num_layers=1)
        self.requests = ReqToTokenPool(num_rows, context_len, str(device))
        slots = 1 + torch.randperm(num_slots, device=device).view(num_rows, kv_len)
        self.requests.req_to_token[:num_rows, :kv_len] = slots
        self.q = heads.queries(count)
        kv_lens = torch.full((count,), kv_len, device=device)
        self.batches = [
            ForwardBatch(
                input_ids=torch.zeros_like(kv_lens),
                positions=kv_lens - 1,
                slots=slots[first : first + count, -1],
                rows=torch.arange(first, first + count, device=device),
                q_lens=[1] * count,
                kv_lens=kv_lens,
                kv_len_upper_bounds=[kv_len] * count,
                graph_key=GraphKey(DECODE, count, 1, count),
            )
            for first in range(0, num_rows, count)
        ]

    def paged(self, batch: ForwardBatch) -> Paged:
        """Where the KV of one of `batches` lies."""
        return Paged(table=self.requests.req_to_token, rows=batch.rows, kv_lens=batch.kv_lens)

    def error(self, out: torch.Tensor, batch: ForwardBatch) -> float:
        """Of some requests of a result [num_requests, num_heads * head_dim], as a share of the
        norm."""
        kv_len, worst = self.shape.kv_len, 0.0
        for request in range(0, len(out), -(-len(out) // SAMPLED_ROWS)):
            slots = self.requests.req_to_token[batch.rows[request], :kv_len].long()
            last = torch.tensor([kv_len - 1], device=out.device)
            expected = attend(self.q[request][None], self.pool.kv[0][slots], last)
            worst = max(worst, relative_error(out[request].view_as(expected), expected))
        return worst


def attend(q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Attention in float32, by its definition.

    Args:
        q: [n, num_heads, head_dim].
        kv: [L, 2 * num_kv_heads, head_dim], the K of a token, then its V.
        positions: [n] int64; the row at position p sees tokens 0..p.

    Returns:
        [n, num_heads, head_dim] float32.
    """
    k, v = kv.float().chunk(2, dim=1)
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, k) * q.shape[2] ** -0.5
    unseen = torch.arange(len(kv), device=q.device) > positions[:, None]
    scores.masked_fill_(unseen[:, None, None], float("-inf"))
    return torch.einsum("nhgl,lhd->nhgd", scores.softmax(-1), v).flatten(1, 2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a share of that of what is expected."""
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(what: str, error: float) -> None:
    """Raises a ValueError where a result differs by more than rounding."""
    if not error < MAX_ERROR:
        raise ValueError(
            f"{what} gives a wrong result: it differs by {error:.1e} of the norm,"
            f" {MAX_ERROR:.0e} is allowed."
        )
