"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.2.2), in Llama's split form."""

from __future__ import annotations

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Table of cos and sin for every position a step can feed.

    The table is computed in float32, as transformers does, whatever the model's type is.
    """

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), theta**-exponent)
        cos, sin = angles.cos(), angles.sin()
        # [max_positions, 2, head_dim]: cos over both halves; sin with the first half negated, so
        # that rotating is x * cos + swapped halves of x * sin.
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self.table: torch.Tensor
        self.register_buffer("table", table, persistent=False)

    def lookup(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T] int64 -> [T, 2, 1, head_dim], shared by all layers of a step."""
        return self.table[positions].to(dtype).unsqueeze(2)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, head_dim] by `RotaryEmbedding.lookup`'s [T, 2, 1, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos_sin[:, 0], swapped, cos_sin[:, 1])
