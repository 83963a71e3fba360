"""Says what the sampling ops may return, in float64, and makes the inputs that tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_kernel import SamplingRows

_EDGE = 3e-5  # relative distance from a filter's edge where float32 may fall on either side
_NEAR_TIE = 3e-5  # relative distance of two racers that float32 may swap


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """Arguments of one sample_tokens call: `logits` [S, V], `banned_ids` [B] int64 or None, and
    the parameters of `SamplingRows`, each [S]."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    banned_ids: torch.Tensor | None = None

    @property
    def rows(self) -> SamplingRows:
        return SamplingRows(*(getattr(self, name) for name in SamplingRows._fields))

    def arguments(self) -> tuple[torch.Tensor, SamplingRows, torch.Tensor | None]:
        """In the order of sample_tokens."""
        return self.logits, self.rows, self.banned_ids

    def row(self, index: int) -> SamplingCase:
        """The case of one row alone."""
        one = slice(index, index + 1)
        rows = (part[one] for part in self.rows)
        return SamplingCase(self.logits[one], *rows, banned_ids=self.banned_ids)

    def to(self, device: str) -> SamplingCase:
        """A copy on a device; the strides of the logits become the usual ones."""
        rows = (part.to(device) for part in self.rows)
        banned_ids = None if self.banned_ids is None else self.banned_ids.to(device)
        return SamplingCase(self.logits.to(device), *rows, banned_ids=banned_ids)


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


@dataclass(frozen=True, slots=True)
class PenaltyCase:
    """Arguments of one penalize_logits call, in its order."""

    logits: torch.Tensor
    counts: torch.Tensor
    penalties: torch.Tensor
    requests: torch.Tensor
    extra_tokens: torch.Tensor | None = None
    extra_counts: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        rows = (self.counts, self.penalties, self.requests)
        return (self.logits, *rows, self.extra_tokens, self.extra_counts)

    def to(self, device: str) -> PenaltyCase:
        """A copy on a device."""
        return PenaltyCase(*(None if v is None else v.to(device) for v in self.arguments()))


def random_penalties(
    rows: int, size: int, seed: int, dtype: torch.dtype = torch.float32, num_extra: int = 0
) -> PenaltyCase:
    """A case of 5 requests with few generated tokens; the last request has no penalties."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    is_generated = torch.rand(5, size, generator=generator) < 0.1
    repetition = torch.tensor([1.0, 1.3, 0.7, 2.0, 1.0])
    frequency = torch.tensor([0.5, 0.0, -0.3, 1.1, 0.0])
    presence = torch.tensor([0.0, 0.2, -2.0, 0.7, 0.0])
    return PenaltyCase(
        logits=(torch.randn(rows, size, generator=generator) * 4).to(dtype),
        counts=(is_generated * draw(1, 9, 5, size)).int(),
        penalties=torch.stack([repetition, frequency, presence], dim=1),
        requests=draw(0, 5, rows),
        extra_tokens=draw(0, size, rows, num_extra) if num_extra else None,
        extra_counts=draw(0, 2, rows, num_extra).int() if num_extra else None,
    )


def assert_penalized(case: PenaltyCase, result: torch.Tensor) -> None:
    """Each logit by the definition, in float64, within float32's rounding."""
    rows, size = case.logits.shape
    expected = case.logits.double()
    for row in range(rows):
        request = case.requests[row]
        count = case.counts[request].double()
        if case.extra_tokens is not None and case.extra_counts is not None:
            for token, extra in zip(case.extra_tokens[row], case.extra_counts[row], strict=True):
                count[token] += extra
        repetition, frequency, presence = case.penalties[request].double()
        values = expected[row]
        factor = torch.where(values > 0, 1 / repetition, repetition)
        lowered = values * factor - count * frequency - presence
        expected[row] = torch.where(count > 0, lowered, values)
    assert result.dtype == torch.float32
    assert result.shape == (rows, size)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=2e-6)


def assert_scored(case: SamplingCase, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    """The log-probabilities are those of the tokens in the unfiltered distribution."""
    values = masked(case.logits, case.banned_ids)
    divisor = torch.where(case.temperature == 0, 1.0, case.temperature).double()
    expected = torch.log_softmax(values / divisor[:, None], dim=-1)
    expected = expected.gather(-1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=2e-6, atol=2e-5)


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
