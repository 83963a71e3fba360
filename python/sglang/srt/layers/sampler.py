"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: increment of SplitMix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the S rows to sample, on the device.

    Attributes:
        temperature: [S] float32; greedy rows hold 0.
        top_p, min_p: [S] float32.
        top_k: [S] int64; the vocabulary size where all tokens are kept.
        seeds: [S] int64.
        positions: [S] int64; index in the sequence of the token that is drawn.
        all_greedy: known on the host, so that greedy batches skip the rest.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] divided by each row's temperature; greedy rows stay as they are."""
        if self.all_greedy:
            return logits
        return logits / torch.where(self.temperature == 0, 1.0, self.temperature)[:, None]


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Draws one token per row.

    The noise of a row depends on (seed, position) alone, so a token does not depend on the batch,
    on overlap or on an earlier retraction.

    Args:
        logits: [S, V] float32.

    Returns:
        [S] int64.
    """
    greedy = logits.argmax(dim=-1)
    if rows.all_greedy:
        return greedy
    is_greedy = rows.temperature == 0
    probs = torch.softmax(rows.scale(logits), dim=-1)
    probs = filter_probs(probs, rows.top_k, rows.top_p, rows.min_p)
    # With E ~ Exp(1), argmax(p / E) follows p: the race of exponential clocks.
    clocks = -torch.log(uniform_noise(rows.seeds, rows.positions, logits.shape[-1]))
    return torch.where(is_greedy, greedy, (probs / clocks).argmax(dim=-1))


def filter_probs(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zeroes the tokens outside top-k, top-p or min-p; each looks at the unfiltered `probs`.

    Top-p keeps the smallest set of best tokens whose mass reaches top_p.

    Args:
        probs: [S, V]; top_k [S] int64, top_p and min_p [S] float32.

    Returns:
        [S, V], not renormalized.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    # A sum of many float32 may round up to 1, so top_p = 1 is no comparison with it.
    mass_limit = torch.where(top_p >= 1, torch.inf, top_p)
    keep = (rank < top_k[:, None]) & (mass_before < mass_limit[:, None])
    keep &= ordered >= ordered[:, :1] * min_p[:, None]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Uniform noise in (0, 1): a hash of (seed, position, token), the same on any device.

    SplitMix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014) over wrapping int64 arithmetic.

    Args:
        seeds, positions: [S] int64.

    Returns:
        [S, size] float32.
    """
    stream = _mix(_mix(seeds) + positions * _GOLDEN)
    counter = torch.arange(1, size + 1, device=seeds.device) * _GOLDEN
    bits = _mix(stream[:, None] + counter)
    # 23 random bits and the half bit fit a float32 exactly and keep 0 and 1 out.
    return ((bits >> 41 & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; torch shifts int64 arithmetically, so the sign bits are masked."""
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ (value >> 31 & 0x1FFFFFFFF)
