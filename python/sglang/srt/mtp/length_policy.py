"""How many tokens to predict under the load at hand.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PRIOR_SURVIVAL = 0.7  # of a prediction, given that the one before it was accepted
LEARNING_RATE = 0.02
FORGETTING_RATE = 0.001  # per step, towards the prior, of what is not tried


@dataclass(frozen=True, slots=True)
class Wishes:
    """Numbers of requests that emit, by their k; 1 of one that looks not ahead.

    Attributes:
        static: those that accept as many tokens as they predict.
        adaptive: those that accept what is confirmed, or probable enough.
    """

    static: Counter[int] = field(default_factory=Counter)
    adaptive: Counter[int] = field(default_factory=Counter)

    @property
    def longest(self) -> int:
        return max((*self.static, *self.adaptive), default=1)

    def num_rows(self, length: int) -> int:
        """Fed by a step in which no request predicts more than `length`, and the one before
        neither. A request whose prompt ends feeds fewer, but pays for what it will have pending."""
        counts = (*self.static.items(), *self.adaptive.items())
        return sum(count * (2 * min(k, length) - 1) for k, count in counts)

    def num_tokens(self, length: int, expected: Sequence[float]) -> float:
        """Given by such a step; `expected[n]` by one that accepts of n tokens what it can."""
        certain = sum(count * min(k, length) for k, count in self.static.items())
        tried = self.adaptive.items()
        return certain + sum(count * expected[min(k, length)] for k, count in tried)


class LengthPolicy(Protocol):
    """Decides lengths on the host, before the step before is read."""

    def limit(self, wishes: Wishes, others: Wishes, num_prompt_rows: int) -> int:
        """Most tokens that any request may predict in the next step.

        Args:
            wishes: of requests that the policy may shorten.
            others: of all others.
            num_prompt_rows: prompt tokens in the step, of any request.
        """

    def observe(self, num_tried: int, num_accepted: int) -> None:
        """An adaptive request could have accepted `num_tried` tokens and accepted
        `num_accepted`."""


class FullLength:
    """Every request predicts as many tokens as it wishes."""

    def limit(self, wishes: Wishes, others: Wishes, num_prompt_rows: int) -> int:
        return wishes.longest

    def observe(self, num_tried: int, num_accepted: int) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Duration of a step by the rows that it feeds, linear between measured points.

    Attributes:
        num_rows: ascending.
        costs_ms: of a step with so many rows.
    """

    num_rows: tuple[int, ...]
    costs_ms: tuple[float, ...]

    def cost_ms(self, num_rows: int) -> float:
        """Beyond the last point the mean slope of the second half goes on: the last one alone may
        be a flat piece between two steps."""
        last = self.num_rows[-1]
        if num_rows <= last:
            return self._between(num_rows)
        slope = (self.costs_ms[-1] - self._between(last // 2)) / (last - last // 2)
        return self.costs_ms[-1] + slope * (num_rows - last)

    def _between(self, num_rows: int) -> float:
        rows, costs = self.num_rows, self.costs_ms
        if num_rows <= rows[0]:
            return costs[0]
        right = bisect.bisect_left(rows, num_rows)
        share = (num_rows - rows[right - 1]) / (rows[right] - rows[right - 1])
        return costs[right - 1] + share * (costs[right] - costs[right - 1])


def measure_costs(
    run_step: Callable[[int], None],
    num_rows: Sequence[int],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Medians of `run_step(rows)`, which must wait for the device, after one run of each to warm
    up; the sizes take turns, so that a slow moment meets one run of many. More rows never cost
    less: where they seem to, it is noise."""
    times_ms: dict[int, list[float]] = {rows: [] for rows in num_rows}
    for rows in num_rows:
        run_step(rows)
    for _, rows in itertools.product(range(repeats), num_rows):
        start = clock()
        run_step(rows)
        times_ms[rows].append((clock() - start) * 1e3)
    costs = (statistics.median(times_ms[rows]) for rows in num_rows)
    return CostTable(tuple(num_rows), tuple(itertools.accumulate(costs, max)))


class LoadAwareLength:
    """Maximizes expected accepted tokens per millisecond, in the long run.

    The expectation comes from how often the j-th token of a run was accepted lately, the price from
    the cost table. A step with prompts costs much whatever it predicts, so there it is no measure:
    a token is worth the time that the same requests need for one when no prompt is there, and a
    length is chosen by what it gains beyond its price. At equal value the longer length wins.
    """

    def __init__(self, costs: CostTable, max_k: int) -> None:
        self._costs = costs
        # Chance that the (j+2)-th token is accepted, given that the one before it is.
        self._survival = [PRIOR_SURVIVAL] * (max_k - 1)

    def limit(self, wishes: Wishes, others: Wishes, num_prompt_rows: int) -> int:
        """See `LengthPolicy`. What this step will not try is forgotten a little: by steps, not by
        requests, or many requests would forget within a few steps what they have learnt."""
        limit = self._best(wishes, others, num_prompt_rows)
        for j in range(limit - 1, len(self._survival)):
            self._move(j, PRIOR_SURVIVAL, FORGETTING_RATE)
        return limit

    def _best(self, wishes: Wishes, others: Wishes, num_prompt_rows: int) -> int:
        lengths = range(1, wishes.longest + 1)
        longest = max(wishes.longest, others.longest)
        expected = [0.0, *(self._expected(length) for length in range(1, longest + 1))]
        given, fed = others.num_tokens(longest, expected), others.num_rows(longest)
        tokens = [given + wishes.num_tokens(length, expected) for length in lengths]
        rows = [fed + wishes.num_rows(length) for length in lengths]
        costs = [self._costs.cost_ms(num_rows) for num_rows in rows]
        rate = max(gained / cost for gained, cost in zip(tokens, costs, strict=True))

        def value(length: int) -> float:
            num_rows = rows[length - 1] + num_prompt_rows
            return tokens[length - 1] - rate * self._costs.cost_ms(num_rows)

        return max(reversed(lengths), key=value)

    def observe(self, num_tried: int, num_accepted: int) -> None:
        for j in range(min(num_tried - 1, num_accepted)):
            self._move(j, float(num_accepted >= j + 2), LEARNING_RATE)

    def _move(self, j: int, towards: float, rate: float) -> None:
        self._survival[j] += rate * (towards - self._survival[j])

    def _expected(self, length: int) -> float:
        """Accepted tokens per step of a request that predicts `length`."""
        expected = chance = 1.0
        for survival in self._survival[: length - 1]:
            chance *= survival
            expected += chance
        return expected
