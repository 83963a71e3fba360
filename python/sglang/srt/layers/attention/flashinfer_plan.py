"""Lays out a step for FlashInfer from numbers of the host. Needs neither a device nor
FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

HEAD_DIMS = (64, 128, 256)
LEAST_FLOAT_WORKSPACE_BYTES = 128 << 20
BLOCKS_PER_MULTIPROCESSOR = 2  # FlashInfer's plan fills them with splits of the KV


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The places of the rows and pages of the R requests of a step.

    Attributes:
        q_lens, kv_lens: R each; rows fed, and tokens with KV.
        qo_indptr: R + 1; rows before each request.
        page_indptr: R + 1; pages before each request.
        last_page_lens: R; tokens on each request's last page, at least 1.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    qo_indptr: tuple[int, ...]
    page_indptr: tuple[int, ...]
    last_page_lens: tuple[int, ...]

    @property
    def is_decode(self) -> bool:
        """Tells whether each request feeds one row."""
        return set(self.q_lens) == {1}

    @property
    def num_pages(self) -> int:
        return self.page_indptr[-1]


def lay_out(q_lens: Sequence[int], kv_lens: Sequence[int], page_size: int) -> StepLayout:
    num_pages = [-(-kv_len // page_size) for kv_len in kv_lens]
    return StepLayout(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        qo_indptr=tuple(accumulate(q_lens, initial=0)),
        page_indptr=tuple(accumulate(num_pages, initial=0)),
        last_page_lens=tuple((kv_len - 1) % page_size + 1 for kv_len in kv_lens),
    )


def window_left(window: int | None) -> int:
    """Returns the keys before its own position that a query sees, as FlashInfer counts them: -1 is
    all."""
    return -1 if window is None else window - 1


def uses_tensor_cores(group: int) -> bool:
    """Decides for a step of one row per request, given the query heads of a KV head. The kernel
    without tensor cores supports no groups of 5 to 7 or above 8, and reads K and V once per query
    head."""
    return group >= 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of each layer of the model.

    Attributes:
        num_heads, num_kv_heads: of queries, and of K and V.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"The attention backend flashinfer has no heads of {self.head_dim} dimensions, only"
                f" of {', '.join(map(str, HEAD_DIMS))}. Use --attention-backend triton."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly,"
                " as the attention backend flashinfer needs. Use --attention-backend triton."
            )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def eager_workspace_bytes(self, num_multiprocessors: int) -> int:
        """Bytes of float workspace that are enough for any step without a graph."""
        return self._workspace_bytes(num_multiprocessors, self._tile(1 << 30), 0)

    def graph_workspace_bytes(
        self, num_multiprocessors: int, num_reqs: int, num_tokens: int
    ) -> int:
        """Bytes of float workspace for the graphs of a key. For graphs FlashInfer reserves room for
        the largest tiles that any split of the rows could need, at least one per request."""
        tile = self._tile((num_tokens - num_reqs + 1) * self.group)
        num_tiles = -(-num_tokens * self.group // tile) + num_reqs - 1
        return self._workspace_bytes(num_multiprocessors, tile, num_tiles)

    def _tile(self, packed_rows: int) -> int:
        """Rows of a tile, where each query head of a KV head is a row of its own."""
        if packed_rows > 64 and self.head_dim < 256:
            return 128
        return 64 if packed_rows > 16 else 16

    def _workspace_bytes(self, num_multiprocessors: int, tile: int, num_tiles: int) -> int:
        """Bytes of a result and its weight, in float32, for each row of each tile."""
        num_splits = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors // self.num_kv_heads
        num_rows = self.num_heads * max(num_splits, num_tiles) * tile
        alignment = 64
        needed = num_rows * (self.head_dim + 1) * 4 + alignment
        return max(needed, LEAST_FLOAT_WORKSPACE_BYTES)
