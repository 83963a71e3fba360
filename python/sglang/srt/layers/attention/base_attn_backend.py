"""Contract of an attention implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool


class GraphSupport(Enum):
    """The batches that a CUDA graph of this backend can replay."""

    NEVER = "never"
    UNIFORM_Q = "uniform_q"  # every request feeds the same number of rows
    RAGGED_Q = "ragged_q"  # requests may feed different numbers of rows


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """The abilities of a backend, as data.

    Attributes:
        page_sizes: None for any.
        tree_masks: it obeys `ForwardBatch.ancestors` and `tree_starts`.
        max_mask_entries: in a step with `ancestors`, the most pairs of a fed row and a key of its
            request; None: any number.
        captures_trees: graphs may have steps with `ancestors`.
        reads_q_starts: it reads `ForwardBatch.q_starts` on the device, so the host does not wait
            for a packed batch. Other backends attend packed batches too, but the host reads
            `q_starts` first.
        captures_plans: after the first call for a key with `GraphKey.is_uniform`, the host's part
            of a plan depends on the key alone. So one graph may have several such steps, each
            planned in the capture, and a replay plans nothing.
        reads_kv_starts: it obeys `MHATokenToKVPool.kv_starts`.
        folds_rows: it obeys `ForwardBatch.num_folded`.
        shares_kv: it gains from `ForwardBatch.shared_prefixes`, in graphs of their own.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    page_sizes: frozenset[int] | None
    graph: GraphSupport
    tree_masks: bool
    captures_trees: bool
    reads_q_starts: bool
    captures_plans: bool
    reads_kv_starts: bool
    shares_kv: bool = False
    max_mask_entries: int | None = None
    folds_rows: bool = False

    def problems(self, device: str, dtype: torch.dtype, page_size: int) -> list[str]:
        """Reasons why the backend cannot serve this configuration; empty when it can."""
        found = []
        if device not in self.devices:
            found.append(f"runs on {sorted(self.devices)}, not on {device}")
        if dtype not in self.dtypes:
            names = sorted(str(known).removeprefix("torch.") for known in self.dtypes)
            found.append(f"has no {dtype}; use --dtype {' or '.join(names)}")
        if self.page_sizes is not None and page_size not in self.page_sizes:
            found.append(f"page sizes are {sorted(self.page_sizes)}, not {page_size}")
        return found


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """The scores of keys, of which attention takes the softmax.

    Attributes:
        scale: factor of the products of queries and keys; None: head_dim ** -0.5.
        softcap: a scaled product s becomes softcap * tanh(s / softcap) (arXiv 2408.00118, section
            2); None: it stays.
    """

    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = ScoreForm()


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged KV pool. The step's own K and V of a layer
    are in the pool when `forward` is called for it.

    A query row at position p sees the keys of positions 0..p of its own request, except those that
    `ForwardBatch.ancestors` hides; these positions count the request's tokens with KV. In a layer
    with a sliding window w (arXiv 2310.06825, section 2) it sees only the last w of them: without a
    tree p-w+1..p; in a tree, where a row sees one row of each depth above its own, those at most
    w-1 before it by `ForwardBatch.positions`. Keys before `MHATokenToKVPool.kv_starts` are not
    seen; all rows of a batch come after it.

    Results of padding rows in a packed batch are arbitrary, maybe NaN. They do not spread: no
    operation mixes rows, and the K and V of these rows go to the dummy slot, which only
    torch_native reads; it gives zeros for them.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        """
        Args:
            num_heads: query heads; those of a KV head are next to each other.
            windows: the sliding window of each layer of the pool, None for full attention.
            scores: of all layers.

        Raises:
            ValueError: if the heads cannot be served.
        """

    @classmethod
    def capabilities(cls) -> AttentionCapabilities: ...

    def plan(self, batch: ForwardBatch) -> None:
        """Prepares a step: called once per step (and once before each capture and replay of a
        graph), before the first layer. See `ForwardBatch.graph_key`. A batch has `ancestors` only
        if the backend has `tree_masks`.
        """

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attends.

        Args:
            layer: index of the layer.
            q: [T, num_heads, head_dim], any strides but the last; see `ForwardBatch.num_folded`.

        Returns:
            [T, num_heads * head_dim].
        """
