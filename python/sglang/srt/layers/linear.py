"""Layers of weights that know how a checkpoint stores them."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.layer_runtime import LayerRuntime


class Linear(nn.Linear):
    """A linear layer whose product the runtime computes."""

    def reset_parameters(self) -> None:
        """Leaves the weights unset; the loader fills them."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        return runtime.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """A table of tokens' hidden states."""

    def reset_parameters(self) -> None:
        """Leaves the weights unset; the loader fills them. To draw random ones on the meta device
        torch would import its compiler, which takes seconds."""


class FusedLinear(Linear):
    """Several linear layers over one input as one matrix product (q, k, v; gate, up).

    Attributes:
        shards: names of the parts in the checkpoint, in order of their rows.
        shard_sizes: output features of each part.
    """

    def __init__(
        self, in_features: int, shards: tuple[str, ...], shard_sizes: tuple[int, ...], bias: bool
    ) -> None:
        super().__init__(in_features, sum(shard_sizes), bias=bias)
        self.shards = shards
        self.shard_sizes = shard_sizes

    def shard_of(self, parameter: torch.Tensor, shard: str) -> torch.Tensor:
        """Returns the rows of `parameter` (weight or bias) that belong to one part."""
        index = self.shards.index(shard)
        start = sum(self.shard_sizes[:index])
        return parameter.narrow(0, start, self.shard_sizes[index])
