"""A simulated decode with drafts: requests that each accept by luck, and policies of tiers."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang.srt.speculative.round_prices import UpcomingRound
from sglang.srt.speculative.tier_policy import RoundOutcome, TierPolicy

LAG = 2  # steps that are launched and not read when a tier is chosen

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

    def round_ms(self, upcoming: UpcomingRound, num_drafts: int) -> float:
        return self.costs_ms[upcoming.num_reqs][num_drafts]


@dataclass(frozen=True)
class Decoded:
    """What a run took.

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


def decode(
    policy: TierPolicy,
    costs_ms: Sequence[float],
    num_reqs: int,
    num_tokens: int,
    chance: Callable[[int], float],
    seed: int = 0,
) -> Decoded:
    """All requests until they have `num_tokens` each on average.

    Args:
        chance: of a draft to be right if those before it are, by step.
    """
    luck, unread = random.Random(seed), deque[RoundOutcome]()
    now_ms, given, tiers = 0.0, 0, Counter[int]()
    num_switches, settled = 0, policy.settled
    while given < num_tokens * num_reqs:
        tier = policy.choose(UpcomingRound(num_reqs))
        num_switches += policy.settled != settled
        settled = policy.settled
        likely = chance(tiers.total())
        outcomes = []
        for _ in range(num_reqs):
            right = 0
            while right < tier and luck.random() < likely:
                right += 1
            outcomes += [(tier, right)] * (tier > 0)
            given += 1 + right
        now_ms += costs_ms[tier]
        tiers[tier] += 1
        unread.append(RoundOutcome(settled, num_reqs, outcomes))
        if len(unread) > LAG:
            policy.observe(unread.popleft())
    return Decoded(now_ms * num_reqs / given, tiers, num_switches, now_ms)


def best_ms_per_token(costs_ms: Sequence[float], chance: float) -> float:
    """Of the best number of drafts, always."""
    tokens = [sum(chance**place for place in range(1 + tier)) for tier in range(len(costs_ms))]
    return min(cost / each for cost, each in zip(costs_ms, tokens, strict=True))
