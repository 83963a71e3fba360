"""The calls of a model's layers that depend on the device: attention, matrix products and the
operations between them. Models are written in these calls; implementations differ by device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.forward_batch import ForwardBatch, single_rows
from sglang.srt.layers.scaled_weight import Weight
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class HeadNorms(NamedTuple):
    """Root mean square normalization of each head, as `LayerOps.add_rms_norm` computes it.

    Attributes:
        queries, keys: weights [head_dim].
        eps: added to the mean square.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


class LayerOps(Protocol):
    """The operations of a layer; each implementation computes the same."""

    def __init__(self, device: torch.device) -> None: ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in_features] times the transpose of weight [out_features, in_features], plus bias
        [out_features]: [T, out_features]. With a weight of 8 bits, an implementation may round x
        too, each row by a scale of its own."""

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`silu_and_mul` of the result of `linear` with a weight [2 * out_features, in_features]:
        [T, out_features]."""

    def experts(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_chosen: int,
        normalizes: bool,
    ) -> torch.Tensor:
        """The sum over the experts with a row's highest scores of softmax(scores) times `linear`
        of `gated_linear` of the row, in the order of the scores.

        Args:
            x: [T, D].
            scores: [T, num_experts].
            gate_up: [num_experts, 2 * size, D], gate first.
            down: [num_experts, D, size].
            normalizes: the weights of the chosen are divided by their sum.

        Returns:
            [T, D].
        """

    def rotation(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Makes the `rotation` of `rotate_and_store` from `RotaryEmbedding.table`; once per
        step."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Root mean square normalization (arXiv 1910.07467) of x + residual.

        Args:
            x, residual: [T, D]; None for no residual.
            weight: [D].

        Returns:
            The normalized sum and the sum, both [T, D] in the type of x.
        """

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up [T, 2 * D], gate first (arXiv 2002.05202): [T, D]."""

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        positions: torch.Tensor | None,
        kv: torch.Tensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Normalizes queries and keys if there are norms, rotates them, and writes keys and values
        into the pool.

        Args:
            heads: [T, num_heads + 2 * num_kv_heads, head_dim]: q, k, v.
            rotation: result of `rotation`; without positions [T, 2, head_dim], a row of its table
                for each token.
            positions, slots: [T] int64.
            kv: [num_slots, 2 * num_kv_heads, head_dim].
            norms: of q and k; None: there are none.

        Returns:
            Rotated queries [T, num_heads, head_dim].
        """


class Collectives(Protocol):
    """The operations of a layer that need all ranks. Every rank calls the same ones in the same
    order; a model that one rank holds calls none."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, of any shape, which may be in the place of x."""

    def join(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' columns x [S, its part of width] side by side: [S, width]."""


class Computed(NamedTuple):
    """One way to compute layers."""

    ops: LayerOps
    attention: AttentionBackend


class LayerRuntime:
    """Attention and operations over the KV pool.

    Args:
        by_default: computes steps.
        in_fixed_orders: computes those with `ForwardBatch.fixed_orders`; None: `by_default` does.
        ranks: None: one rank holds the model.
        max_folded: rows that attention may be given as one; see `ForwardBatch.num_folded`.
    """

    def __init__(
        self,
        by_default: Computed,
        kv_pool: MHATokenToKVPool,
        ranks: Collectives | None = None,
        max_folded: int = 1,
        in_fixed_orders: Computed | None = None,
    ) -> None:
        self._ranks = ranks
        self._max_folded, self._num_folded = max_folded, 1
        self._ways = by_default, in_fixed_orders or by_default
        self._kv_pool = kv_pool
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)
        self._use(by_default)

    def _use(self, way: Computed) -> None:
        """Has steps computed so."""
        self._ops, self._backend = ops, _ = way
        self.linear = ops.linear
        self.add_rms_norm = ops.add_rms_norm
        self.gated_linear = ops.gated_linear
        self.experts = ops.experts

    def plan(self, batch: ForwardBatch) -> None:
        """Plans attention, once per step, before the first layer. All that follows, logits too, is
        computed in the orders that the step asks for."""
        self._use(self._ways[batch.fixed_orders])
        self._positions, self._slots = batch.positions, batch.slots
        assert self._positions.is_contiguous(), "Kernels read them side by side."
        assert self._slots.is_contiguous(), "Kernels read them side by side."
        if batch.is_block:
            batch = single_rows(batch, self._max_folded)
        self._num_folded = batch.num_folded
        self._backend.plan(batch)

    @property
    def ranks(self) -> Collectives:
        assert self._ranks is not None, "A part of a model, and no other ranks."
        return self._ranks

    def rotation(self, table: torch.Tensor) -> torch.Tensor:
        """Makes the `rotation` of `attend` from `RotaryEmbedding.table`; once per step."""
        return self._ops.rotation(table, self._positions)

    def attend(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        norms: HeadNorms | None = None,
        by_token: bool = False,
    ) -> torch.Tensor:
        """Attention of a layer, causal but in blocks, over the KV of each request and this step.

        Args:
            layer: index of the layer.
            heads: [T, num_heads + 2 * num_kv_heads, head_dim]: q, k, v, not rotated.
            rotation: of this step.
            norms: of queries and keys before they are rotated.
            by_token: the rotation has a row for each token, see `LayerOps.rotate_and_store`.

        Returns:
            [T, num_heads * head_dim].
        """
        q = self._rotated(layer, heads, rotation, norms, by_token)
        if self._num_folded == 1:
            return self._backend.forward(layer, q)
        num_kv_heads, (num_rows, _, head_dim) = self._kv_pool.kv[layer].shape[1] // 2, q.shape
        shape = num_rows // self._num_folded, self._num_folded, num_kv_heads, -1
        folded = q.reshape(*shape, head_dim).transpose(1, 2).flatten(1, 3)
        out = self._backend.forward(layer, folded)
        return out.view(shape[0], num_kv_heads, shape[1], -1).transpose(1, 2).reshape(num_rows, -1)

    def store(
        self,
        layer: int,
        keys_values: torch.Tensor,
        rotation: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """Stores K and V of a layer and attends nothing.

        Args:
            keys_values: [T, 2 * num_kv_heads, head_dim]: k, v, not rotated.
        """
        self._rotated(layer, keys_values, rotation, norms)

    def _rotated(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        norms: HeadNorms | None,
        by_token: bool = False,
    ) -> torch.Tensor:
        """Stores K and V; returns rotated queries."""
        positions = None if by_token else self._positions
        kv = self._kv_pool.kv[layer]
        return self._ops.rotate_and_store(heads, rotation, positions, kv, self._slots, norms)
