"""What the sampling ops may return, in float64, and the inputs that tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_EDGE = 3e-5  # relative distance from a filter's edge where float32 may fall on either side
_NEAR_TIE = 3e-5  # relative distance of two racers that float32 may swap


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """Arguments of one sample_tokens call.

    Attributes:
        logits: [S, V]; temperature, top_p, min_p: [S] float32.
        top_k, seeds, positions: [S] int64.
        banned_ids: [B] int64 or None.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    banned_ids: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of sample_tokens."""
        rows = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions)
        return (self.logits, *rows, self.banned_ids)

    def to(self, device: str) -> SamplingCase:
        """A copy on a device; the strides of the logits become the usual ones."""
        moved = [None if value is None else value.to(device) for value in self.arguments()]
        return SamplingCase(*moved)


def random_case(
    rows: int, size: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> SamplingCase:
    """A case whose rows differ in their filters; every seventh row is greedy."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float]) -> torch.Tensor:
        picks = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values)[picks]

    temperature = choose([0.3, 0.7, 1.0, 1.5])
    temperature[6::7] = 0.0
    return SamplingCase(
        logits=(torch.randn(rows, size, generator=generator) * spread).to(dtype),
        temperature=temperature,
        top_k=choose([1, 2, 5, 50, size, size]).to(torch.int64),
        top_p=choose([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
        min_p=choose([0.0, 0.0, 0.02, 0.3]),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.randint(0, 100000, (rows,), generator=generator),
    )


def unfiltered(case: SamplingCase) -> SamplingCase:
    """The case with all filters off and temperature 1."""
    return replace(
        case,
        temperature=torch.ones_like(case.temperature),
        top_k=torch.full_like(case.top_k, case.logits.shape[1]),
        top_p=torch.ones_like(case.top_p),
        min_p=torch.zeros_like(case.min_p),
    )


def masked(logits: torch.Tensor, banned_ids: torch.Tensor | None) -> torch.Tensor:
    """[S, V] float64 with -inf for banned ids."""
    values = logits.to(torch.float64).clone()
    if banned_ids is not None:
        values[:, banned_ids] = -torch.inf
    return values


def noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """[S, size] float64 with Python's integers: SplitMix64 by its definition."""
    rows = [
        [_uniform(seed, position, token) for token in range(size)]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def winners(case: SamplingCase, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact winners and all tokens that rounding may put in their place.

    Args:
        uniform: [S, V] noise.

    Returns:
        [S] int64, [S, V] bool.
    """
    values = masked(case.logits, case.banned_ids)
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    is_greedy = case.temperature == 0
    divisor = torch.where(is_greedy, 1.0, case.temperature).to(torch.float64)
    probs = torch.softmax(ordered / divisor[:, None], dim=-1)
    clocks = -torch.log(uniform.to(torch.float64)).gather(-1, order)
    score = probs / clocks

    exact = score.where(_kept(probs, case, 0.0, is_greedy), -1.0)
    certain = score.where(_kept(probs, case, -_EDGE, is_greedy), -1.0).amax(dim=-1, keepdim=True)
    possible = score.where(_kept(probs, case, _EDGE, is_greedy), -1.0)
    acceptable = possible >= certain * (1 - _NEAR_TIE)
    winner = order.gather(-1, exact.argmax(dim=-1, keepdim=True))[:, 0]
    return winner, torch.zeros_like(acceptable).scatter(-1, order, acceptable)


def assert_drawn(case: SamplingCase, uniform: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Every token is one that the float64 race allows, and nearly all are its exact winner."""
    winner, acceptable = winners(case, uniform)
    is_allowed = acceptable.gather(-1, token_ids[:, None])[:, 0]
    wrong = (~is_allowed).nonzero()[:, 0].tolist()
    assert not wrong, f"rows {wrong}: {token_ids[wrong]} instead of {winner[wrong]}"
    num_different = int((winner != token_ids).sum())
    assert num_different <= max(1, len(token_ids) // 50), num_different


def _kept(
    probs: torch.Tensor, case: SamplingCase, slack: float, is_greedy: torch.Tensor
) -> torch.Tensor:
    rank = torch.arange(probs.shape[-1], device=probs.device)
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = case.top_p.to(torch.float64)[:, None]
    min_p = case.min_p.to(torch.float64)[:, None]
    keep = (rank < case.top_k[:, None]) & ((mass_before < top_p + slack) | (top_p >= 1))
    keep &= probs >= probs[:, :1] * min_p * (1 - slack)
    keep &= ~is_greedy[:, None]
    keep[:, 0] = True
    return keep


def _uniform(seed: int, position: int, token: int) -> float:
    wrap = 2**64
    golden = 0x9E3779B97F4A7C15
    stream = _finalize((_finalize(seed % wrap) + position * golden) % wrap)
    bits = _finalize((stream + (token + 1) * golden) % wrap) >> 41
    return (bits % 2**23 + 0.5) / 2**23


def _finalize(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) % 2**64
    return value ^ value >> 31
