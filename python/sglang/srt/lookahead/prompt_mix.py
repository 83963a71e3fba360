"""Follows the prompts that share rounds with decoding requests: their rows take room that drafts
might have had for nothing."""

from __future__ import annotations

import math

from sglang.srt.lookahead.round_prices import StepCase
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep

ROW_GRAIN = 32  # rows of prompts are rounded to multiples of it: there are few prices to compute
MEMORY_STEPS, MEMORY_PROMPTS = 64, 16  # steps that are remembered, and of these with prompts
LEAST_PROMPTS = 0.02  # of a step; below, they are left out
# Numbers of prompts that are looked at: SPREAD standard deviations around the mean, MAX_NUMBERS at
# most.
SPREAD, MAX_NUMBERS = 1.7, 6


class Mean:
    """A running mean of the last `memory` values; 0 when empty."""

    def __init__(self, memory: int) -> None:
        self.value = 0.0
        self.count = 0
        self._memory = memory

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self._memory)
        self.value += (value - self.value) / self.count


class PromptMix:
    """Estimates how many prompts, of how many rows, come with a number of new tokens, by the last
    steps in which requests decode. A request that is given more tokens per step ends sooner, and
    the next one's prompt comes sooner: so prompts are counted by tokens, not by steps.

    A prompt that is read in several steps fills all of them but the last, so what it feeds is never
    twice in a step. Such full steps are counted apart, with all that they feed.
    """

    def __init__(self, max_rows: int) -> None:
        self._most_rows = in_grains(max_rows)
        self._full, self._full_rows = Mean(MEMORY_STEPS), Mean(MEMORY_PROMPTS)
        self._prompts, self._rows = Mean(MEMORY_STEPS), Mean(MEMORY_PROMPTS)  # of other steps
        self._tokens = Mean(MEMORY_STEPS)  # of a step

    def plan(self, upcoming: UpcomingStep) -> None:
        """Hears of a step that is launched, before policies choose for the next one."""
        num_new = upcoming.num_new
        if upcoming.num_reqs == num_new:  # nothing decodes
            return
        is_full = upcoming.prompt_reqs > 0  # one of the prompts does not end in it
        self._full.add(is_full)
        if is_full:
            self._full_rows.add(upcoming.prompt_rows)
            return
        self._prompts.add(num_new)
        if num_new:
            self._rows.add(upcoming.prompt_rows / num_new)

    def observe(self, outcome: StepOutcome) -> None:
        """Hears how many tokens a step gave, also beyond the ends of requests."""
        if outcome.record.plan.num_drafted_for is not None:
            self._tokens.add(sum(outcome.result.accept_lens))

    def cases(self, upcoming: UpcomingStep, pace: float) -> StepCase:
        """Returns what may share a step of these requests, if steps give each of them `pace`
        tokens. Prompts come by chance, each alone, so their number is Poisson's; full steps come as
        often as they may."""
        num_reqs, num_plain = upcoming.num_reqs, upcoming.num_plain
        tokens = max(1.0, self._tokens.value if self._tokens.count else num_reqs)
        growth = (num_reqs - num_plain) * pace / tokens
        full = min(self._full.value * growth, 1.0)
        expected = min(self._prompts.value * growth, float(num_reqs))
        if max(full, expected) < LEAST_PROMPTS:
            return StepCase(num_reqs, upcoming.kv_tokens, num_plain=num_plain)
        numbers = _numbers(expected) if expected >= LEAST_PROMPTS else [(1.0, 0.0)]
        each, others, most = self._rows.value, 1.0 - full, self._most_rows
        prompts = dict[int, float]()  # the chance of a number of rows
        for chance, number in numbers:
            rows = in_grains(number * each, most)
            prompts[rows] = prompts.get(rows, 0.0) + others * chance
        if full:
            rows = in_grains(self._full_rows.value, most)
            prompts[rows] = prompts.get(rows, 0.0) + full
        found = tuple([(chance, rows) for rows, chance in prompts.items() if chance])
        return StepCase(num_reqs, upcoming.kv_tokens, found, num_plain)


def _numbers(mean: float) -> list[tuple[float, float]]:
    """Poisson numbers of this mean, each with its chance: the likely ones, or MAX_NUMBERS between
    them that are as far apart. Their mean is about the same."""
    off = SPREAD * math.sqrt(mean)
    least, end = max(0, math.floor(mean - off)), math.ceil(mean + off) + 1
    stride, found = -(-(end - least) // MAX_NUMBERS), list[tuple[float, float]]()
    log_mean, total = math.log(mean), 0.0
    for first in range(least, end, stride):
        weight = moment = 0.0
        for number in range(first, min(first + stride, end)):
            chance = math.exp(number * log_mean - mean - math.lgamma(number + 1))
            weight += chance
            moment += chance * number
        total += weight
        found.append((weight, moment / weight))
    return [(weight / total, number) for weight, number in found]


def in_grains(rows: float, most: int | None = None) -> int:
    """Rounds to whole grains, any rows to one at least."""
    found = (round(rows / ROW_GRAIN) or 1) * ROW_GRAIN if rows else 0
    return found if most is None or found < most else most
