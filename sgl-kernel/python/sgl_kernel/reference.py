"""Every op in plain torch: what runs on the CPU, and what the kernels are tested against."""

from __future__ import annotations

import torch

from sgl_kernel.sampling_rows import SamplingRows

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_FIRST = 0xBF58476D1CE4E5B9
_MIX_SECOND = 0x94D049BB133111EB


def argmax(logits: torch.Tensor, banned_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.argmax`."""
    return _allowed(logits, banned_ids).argmax(dim=-1)


def argmax_logprob(
    logits: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and results as `sgl_kernel.argmax_logprob`."""
    allowed = _allowed(logits, banned_ids)
    token_ids = allowed.argmax(dim=-1)
    best = allowed.gather(-1, token_ids[:, None])[:, 0]
    return token_ids, best, -(allowed - best[:, None]).logsumexp(dim=-1)


def sample_tokens(
    logits: torch.Tensor, rows: SamplingRows, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `sgl_kernel.sample_tokens`."""
    allowed = _allowed(logits, banned_ids)
    is_drawn = rows.temperature > 0
    divisor = torch.where(is_drawn, rows.temperature, 1.0)
    ordered, order = allowed.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(ordered / divisor[:, None], dim=-1)
    keep = kept_tokens(probs, rows)
    clocks = -torch.log(uniform_noise(rows.seeds, rows.positions, logits.shape[-1]))
    # argmax(p / E) with E ~ Exp(1) follows p.
    race = torch.where(keep, probs, 0.0) / clocks.gather(-1, order)
    winner = race.argmax(dim=-1)
    is_drawn &= ordered[:, 0].isfinite()
    place = torch.where(is_drawn, winner, 0)[:, None]
    # To the best logit before anything is scaled: differences of large numbers lose digits.
    relative = (ordered - ordered[:, :1]) / divisor[:, None]
    logprobs = relative.gather(-1, place)[:, 0] - relative.logsumexp(dim=-1)
    return order.gather(-1, place)[:, 0], logprobs


def penalize_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    requests: torch.Tensor,
    extra_tokens: torch.Tensor | None = None,
    extra_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.penalize_logits`."""
    values, count = logits.to(torch.float32), counts[requests]
    if extra_tokens is not None and extra_counts is not None:
        count.scatter_add_(1, extra_tokens, extra_counts)
    repetition, frequency, presence = penalties[requests].unsqueeze(-1).unbind(1)
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    return torch.where(count > 0, scaled - (count * frequency + presence), values)


def kept_tokens(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which tokens pass all filters; probs [S, V] are in descending order.

    Returns:
        [S, V] bool; column 0 is always True.
    """
    top_p, min_p = rows.top_p[:, None], rows.min_p[:, None]
    rank = torch.arange(probs.shape[-1], device=probs.device)
    mass_before = probs.cumsum(dim=-1) - probs
    # Rounding can bring the mass up to 1, and top_p = 1 keeps even what comes then.
    keep = (mass_before < top_p) | (top_p >= 1)
    keep &= rank < rows.top_k[:, None]
    keep &= probs >= probs[:, :1] * min_p
    keep[:, 0] = True
    return keep


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.uniform_noise`."""
    stream = _mix(_mix(seeds) + positions * _as_int64(_GOLDEN))
    tokens = torch.arange(1, size + 1, device=seeds.device)
    hashed = _mix(stream[:, None] + tokens * _as_int64(_GOLDEN))
    bits = _shift_right(hashed, 41)
    # Odd multiples of 2^-24: exact in float32, and neither 0 nor 1.
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _allowed(logits: torch.Tensor, banned_ids: torch.Tensor | None) -> torch.Tensor:
    """[S, V] float32 with -inf for banned ids; ids outside the vocabulary are ignored."""
    values = logits.to(torch.float32)
    if banned_ids is None:
        return values
    size = logits.shape[-1]
    inside = banned_ids[(banned_ids >= 0) & (banned_ids < size)]
    return values.index_fill(-1, inside, -torch.inf)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on wrapping int64."""
    value = (value ^ _shift_right(value, 30)) * _as_int64(_MIX_FIRST)
    value = (value ^ _shift_right(value, 27)) * _as_int64(_MIX_SECOND)
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(unsigned: int) -> int:
    """The int64 with the same bits."""
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
