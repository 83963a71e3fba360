"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.2.2), in Llama's split form."""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.srt.rope_config import Llama3Scaling, RopeConfig, RopeScaling, YarnScaling


class RotaryEmbedding(nn.Module):
    """Holds a table of cos and sin for every position a step can feed, once `fill` is called. It is
    float32, whatever the model's type is."""

    def __init__(self, head_dim: int, max_positions: int, config: RopeConfig) -> None:
        super().__init__()
        self._head_dim, self._max_positions, self._config = head_dim, max_positions, config
        self.table: torch.Tensor
        self.register_buffer("table", torch.empty(max_positions, 2, head_dim), persistent=False)

    def fill(self) -> None:
        """Computes the table on torch's current default device."""
        self.table = rotation_table(self._head_dim, self._max_positions, self._config)


def rotation_table(head_dim: int, max_positions: int, config: RopeConfig) -> torch.Tensor:
    """Gives [max_positions, 2, head_dim] float32: cos over both halves; sin with the first half
    negated, so that rotating is x * cos + swapped halves of x * sin."""
    frequencies = inverse_frequencies(head_dim, config)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    factor = attention_factor(config.scaling)
    table = angles.new_empty(max_positions, 2, 2, head_dim // 2)  # by halves
    table[:, 0] = (angles.cos() * factor)[:, None]
    torch.mul(angles.sin(), factor, out=table[:, 1, 1])
    torch.neg(table[:, 1, 1], out=table[:, 1, 0])
    return table.flatten(2)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Returns the factor of cos and sin."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def inverse_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = config.theta**exponents  # over 2 pi
    scaling = config.scaling
    if scaling is None:
        return 1.0 / wavelengths
    if isinstance(scaling, YarnScaling):
        return _yarn(wavelengths, config.theta, scaling)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(1.0 / wavelengths, scaling)
    return 1.0 / wavelengths / scaling.factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divides the low frequencies, keeps the high ones, and mixes both between the bounds."""
    turns = scaling.original_context_len / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn(wavelengths: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """NTK-by-parts (arXiv 2309.00071, section 3.2), ramped over dimensions, not over turns."""
    num_pairs = wavelengths.shape[0]

    def pair_with_turns(turns: float) -> float:
        """Returns the (fractional) pair of dimensions that turns `turns` times within the original
        context."""
        wavelength = scaling.original_context_len / (turns * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(theta)

    first, last = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(num_pairs, dtype=torch.float32) - first) / (last - first)
    kept_share = 1 - ramp.clamp(0.0, 1.0)
    interpolated = 1.0 / (scaling.factor * wavelengths)
    return interpolated * (1 - kept_share) + 1.0 / wavelengths * kept_share
