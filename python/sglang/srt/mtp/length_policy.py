"""How many tokens to predict under the load at hand.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

PRIOR_SURVIVAL = 0.7  # of a prediction, given that the one before it was accepted
LEARNING_RATE = 0.02
FORGETTING_RATE = 0.001  # per step, towards the prior, of what is not tried


@dataclass(frozen=True, slots=True)
class OtherRows:
    """What a step feeds besides the requests that a policy may shorten.

    Attributes:
        num_decoding: requests that decode; each gives a token at least.
        num_decode_rows: their rows.
        num_prompt_rows: of any request.
    """

    num_decoding: int = 0
    num_decode_rows: int = 0
    num_prompt_rows: int = 0


class LengthPolicy(Protocol):
    """Decides lengths on the host, before the step before is read."""

    def limit(self, wishes: Sequence[int], others: OtherRows) -> int:
        """Most tokens that any request may predict in the next step.

        Args:
            wishes: k of each request that the policy may shorten.
        """

    def observe(self, num_tried: int, num_accepted: int) -> None:
        """A request could have accepted `num_tried` tokens and accepted `num_accepted`."""


class FullLength:
    """Every request predicts as many tokens as it wishes."""

    def limit(self, wishes: Sequence[int], others: OtherRows) -> int:
        return max(wishes)

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

    @classmethod
    def flat(cls) -> CostTable:
        """Rows cost nothing: every request predicts as many tokens as it wishes."""
        return cls((1,), (1.0,))

    def cost_ms(self, num_rows: int) -> float:
        """Beyond the last point the last slope goes on."""
        rows, costs = self.num_rows, self.costs_ms
        if len(rows) == 1 or num_rows <= rows[0]:
            return costs[0]
        right = min(bisect.bisect_left(rows, num_rows), len(rows) - 1)
        share = (num_rows - rows[right - 1]) / (rows[right] - rows[right - 1])
        return costs[right - 1] + share * (costs[right] - costs[right - 1])


def measure_costs(
    run_step: Callable[[int], None],
    num_rows: Sequence[int],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Medians of `run_step(rows)`, which must wait for the device, after one run to warm up."""
    costs = []
    for rows in num_rows:
        run_step(rows)
        times = []
        for _ in range(repeats):
            start = clock()
            run_step(rows)
            times.append((clock() - start) * 1e3)
        costs.append(statistics.median(times))
    return CostTable(tuple(num_rows), tuple(costs))


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

    def limit(self, wishes: Sequence[int], others: OtherRows) -> int:
        """See `LengthPolicy`. What this step will not try is forgotten a little: by steps, not by
        requests, or many requests would forget within a few steps what they have learnt."""
        limit = self._best(wishes, others)
        for j in range(limit - 1, len(self._survival)):
            self._move(j, PRIOR_SURVIVAL, FORGETTING_RATE)
        return limit

    def _best(self, wishes: Sequence[int], others: OtherRows) -> int:
        counts = Counter(wishes)
        lengths = range(1, max(wishes) + 1)
        tokens = [others.num_decoding + self._num_tokens(counts, length) for length in lengths]
        rows = [others.num_decode_rows + _num_rows(counts, length) for length in lengths]
        cost_ms = self._costs.cost_ms
        rate = max(gained / cost_ms(fed) for gained, fed in zip(tokens, rows, strict=True))

        def value(length: int) -> float:
            fed = rows[length - 1] + others.num_prompt_rows
            return tokens[length - 1] - rate * cost_ms(fed)

        return max(reversed(lengths), key=value)

    def _num_tokens(self, counts: Counter[int], length: int) -> float:
        """Expected of a step in which no request predicts more than `length`."""
        return sum(count * self._expected(min(wish, length)) for wish, count in counts.items())

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


def _num_rows(counts: Counter[int], length: int) -> int:
    """Fed by a step in which no request predicts more than `length`, and the one before neither."""
    return sum(count * (2 * min(wish, length) - 1) for wish, count in counts.items())
