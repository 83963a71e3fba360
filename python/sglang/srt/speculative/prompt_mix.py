"""Which prompts share the rounds of requests that decode: their rows take room that drafts might
have had for nothing."""

from __future__ import annotations

import math

from sglang.srt.speculative.round_prices import RoundCase, UpcomingRound
from sglang.srt.step.worker import ScheduleBatch

ROW_GRAIN = 32  # rows of prompts are rounded to so many, so that there are few prices to compute
MEMORY_STEPS, MEMORY_PROMPTS = 64, 16  # steps that are remembered, and of these with prompts
LEAST_PROMPTS = 0.02  # of a step; below, they are left out
# Numbers of prompts that are looked at: so many standard deviations around the mean, and so many.
SPREAD, MAX_NUMBERS = 1.7, 6


def round_of(batch: ScheduleBatch) -> RoundCase:
    """What the requests of a step that decode do, beside its prompts."""
    lens = zip(batch.kv_len_upper_bounds, batch.max_q_lens, batch.num_prompt_tokens, strict=True)
    decodes = [bound - reserved for bound, reserved, num_prompt in lens if not num_prompt]
    return RoundCase(len(decodes), sum(decodes), _rounded(sum(batch.num_prompt_tokens)))


class PromptMix:
    """How many prompts come with so many new tokens, and of how many rows they are, by the last
    steps in which requests decode. A request that is given more tokens per step ends sooner, and
    the next one's prompt comes sooner: so it is tokens, not steps, that prompts are counted by.

    Args:
        max_rows: of prompts in a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._prompts = self._rows = 0.0  # of a step; of a prompt
        self._tokens = 0.0  # of a step
        self._num_steps = self._num_prompts = self._num_read = 0

    def observe(self, num_prompts: int, prompt_rows: int) -> None:
        """Hears of a step in which requests decode, with so many rows of prompts in all."""
        self._num_steps = min(self._num_steps + 1, MEMORY_STEPS)
        self._prompts += (num_prompts - self._prompts) / self._num_steps
        if num_prompts:
            self._num_prompts = min(self._num_prompts + 1, MEMORY_PROMPTS)
            self._rows += (prompt_rows / num_prompts - self._rows) / self._num_prompts

    def hear(self, num_tokens: int) -> None:
        """Hears how many tokens such a step gave."""
        self._num_read = min(self._num_read + 1, MEMORY_STEPS)
        self._tokens += (num_tokens - self._tokens) / self._num_read

    def upcoming(self, num_reqs: int, kv_tokens: int, pace: float) -> UpcomingRound:
        """A round of these requests, if rounds give each of them so many tokens. Prompts come by
        chance, each alone, so their number is Poisson's."""
        tokens = max(1.0, self._tokens if self._num_read else num_reqs)
        expected = min(self._prompts * num_reqs * pace / tokens, float(num_reqs))
        if expected < LEAST_PROMPTS:
            return UpcomingRound(num_reqs, kv_tokens)
        prompts = dict[int, float]()  # the chance of so many rows
        for chance, count in _numbers(expected):
            rows = min(_rounded(count * self._rows), _rounded(self._max_rows))
            prompts[rows] = prompts.get(rows, 0.0) + chance
        found = tuple((chance, rows) for rows, chance in prompts.items())
        return UpcomingRound(num_reqs, kv_tokens, found)


def _numbers(mean: float) -> list[tuple[float, float]]:
    """Poisson numbers of this mean, each with its chance: the likely ones, or so many between them
    that are as far apart. Their mean is about the same."""
    off = SPREAD * math.sqrt(mean)
    least, most = max(0, math.floor(mean - off)), math.ceil(mean + off)
    stride = -(-(most + 1 - least) // MAX_NUMBERS)
    log_mean = math.log(mean)
    chances = {
        n: math.exp(n * log_mean - mean - math.lgamma(n + 1)) for n in range(least, most + 1)
    }
    groups = [
        range(first, min(first + stride, most + 1)) for first in range(least, most + 1, stride)
    ]
    weights = [sum(chances[n] for n in group) for group in groups]
    total = sum(weights)
    means = [
        sum(chances[n] * n for n in group) / weight
        for group, weight in zip(groups, weights, strict=True)
    ]
    return [(weight / total, number) for weight, number in zip(weights, means, strict=True)]


def _rounded(rows: float) -> int:
    """To whole grains; some rows are one at least."""
    return max(1, round(rows / ROW_GRAIN)) * ROW_GRAIN if rows else 0
