"""A simulated decode with drafts: requests that each accept by luck, and policies of tiers."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from policy_steps import drafted, drafting_step
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.round_prices import StepCase

LAG = 2  # steps that are launched and not read when a tier is chosen
NUM_NEW = 128  # tokens of a request

# An 8B model on an H200, by requests: a plain step, and rounds of 1, 2 and 3 drafts. Of these the
# first and the last were measured; those between are guesses.
H200_MS = {
    1: (4.39, 5.3, 5.6, 5.95),
    8: (4.42, 5.5, 5.9, 6.46),
    32: (5.12, 6.2, 6.8, 7.43),
    64: (5.65, 7.2, 8.6, 10.2),
    128: (6.63, 9.8, 13.2, 17.3),
}


@dataclass(frozen=True)
class ListedRounds:
    """Prices by requests and number of drafts."""

    costs_ms: Mapping[int, Sequence[float]]
    spread: float = 0.004

    def round_ms(self, upcoming: StepCase, num_drafts: int) -> float:
        return self.costs_ms[upcoming.num_reqs][num_drafts]


@dataclass(frozen=True)
class Decoded:
    """Holds the costs of a run.

    Attributes:
        ms_per_token: of each request.
        tiers: how many steps had each.
        num_switches: how often another tier was settled on.
        ms: all in all.
    """

    ms_per_token: float
    tiers: Counter[int]
    num_switches: int
    ms: float


class Decoding:
    """So many requests at once, of NUM_NEW tokens each: one that ends is replaced.

    Attributes:
        num_reqs: how many.
        policy: chooses their tiers.
    """

    def __init__(self, policy: LengthPolicy, num_reqs: int) -> None:
        self.num_reqs = num_reqs
        self.policy = policy
        self._left = [NUM_NEW - row % NUM_NEW for row in range(num_reqs)]

    def run(
        self,
        costs_ms: Sequence[float],
        num_tokens: int,
        chance: Callable[[int], float],
        seed: int = 0,
    ) -> Decoded:
        """Until requests were given `num_tokens` on average.

        Args:
            chance: of a draft to be right if those before it are, by step.
        """
        luck, unread, rows = random.Random(seed), deque[list[int]](), range(self.num_reqs)
        now_ms, given, tiers, policy = 0.0, 0, Counter[int](), self.policy
        num_switches, settled = 0, policy.settled
        while given < num_tokens * self.num_reqs:
            tier = policy.choose(drafting_step(self.num_reqs)).limit - 1
            num_switches += policy.settled != settled
            settled = policy.settled
            found = [self.right(row, tier, chance(tiers.total()), luck) for row in rows]
            given += self.num_reqs + sum(found)
            now_ms += costs_ms[tier]
            tiers[tier] += 1
            unread.append([tier, settled, *found])
            if len(unread) > LAG:
                self._read(*unread.popleft())
        return Decoded(now_ms * self.num_reqs / given, tiers, num_switches, now_ms)

    def right(self, row: int, tier: int, chance: float, luck: random.Random) -> int:
        """Draws how many drafts of a request are right."""
        return right_drafts(luck, tier, chance)

    def _read(self, tier: int, settled: int, *found: int) -> None:
        rows = range(self.num_reqs)
        self.policy.observe(drafted(settled, self.num_reqs, [tier] * len(rows), found))
        for row, right in zip(rows, found, strict=True):
            self._left[row] -= 1 + right
            if self._left[row] <= 0:
                self._left[row] += NUM_NEW


def right_drafts(luck: random.Random, num_drafts: int, chance: float) -> int:
    """Draws how many drafts of a chain are right, if each is with this chance, given those before
    it."""
    right = 0
    while right < num_drafts and luck.random() < chance:
        right += 1
    return right


def best_ms_per_token(costs_ms: Sequence[float], chance: float) -> float:
    """Returns the time of a token if steps always have the best number of drafts."""
    tokens = [sum(chance**place for place in range(1 + tier)) for tier in range(len(costs_ms))]
    return min(cost / each for cost, each in zip(costs_ms, tokens, strict=True))
