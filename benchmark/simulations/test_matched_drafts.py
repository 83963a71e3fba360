"""Speed of NGRAM's policy, simulated: text that begins and ceases to repeat itself.

python -m pytest benchmark/simulations
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest

from policy_steps import drafted
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.matched_drafts import MatchedDrafts, class_of
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import StepCase
from sglang.srt.lookahead.upcoming_step import EmittingRequest, UpcomingStep
from simulated_rounds import LAG, right_drafts

MAX_DRAFTS, PLAIN_MS = 11, 4.4
LONGEST = 18
# That a draft is right, by class of match, where nothing is repeated: chance alone.
CHANCE = (0.01, 0.02, 0.05, 0.1, 0.3, 0.5)
CHAIN = tuple((0, place) for place in range(MAX_DRAFTS))
# Branch and place of each node of a tree, in the order of likelihood: where nothing is repeated
# other first tokens are as good as second ones.
NOVEL_NODES = (
    *((0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1)),
    *((0, 3), (3, 0), (0, 4), (0, 5), (1, 2)),
)
REPEATED_NODES = (*((0, place) for place in range(7)), (1, 0), (1, 1), (2, 0), (3, 0))


def kind_of(match_len: int) -> Kind:
    return Kind(match=class_of(match_len))


@dataclass(frozen=True)
class Prices:
    """Rounds of a GPU: `per_row` and `per_round` are shares of a plain step."""

    per_row: float
    per_round: float = 0.02
    spread: float = 0.002

    def round_ms(self, upcoming: StepCase, num_drafts: int) -> float:
        rows = num_drafts * upcoming.num_reqs
        return PLAIN_MS * (1 + (self.per_round + self.per_row * rows if num_drafts else 0.0))


@dataclass
class Decoding:
    """Requests that decode side by side. Speeds are tokens per time, of plain decoding 1."""

    policy: MatchedDrafts
    prices: Prices
    num_reqs: int
    has_trees: bool
    random: random.Random = field(default_factory=lambda: random.Random(1))
    tier: int = 0

    def __post_init__(self) -> None:
        self.lens = deque([[0] * self.num_reqs] * LAG)
        self.unread = deque[list[tuple[int, int, list[int]]]]()

    def run(self, num_steps: int, repeats: bool) -> float:
        """Speed of so many steps of text that repeats itself, or does not."""
        ms, num_tokens, upcoming = 0.0, 0, StepCase(self.num_reqs)
        for _ in range(num_steps):
            kinds = Counter(EmittingRequest(kind_of(each), 1 + MAX_DRAFTS) for each in self.lens[0])
            next_tier = self.policy.choose(UpcomingStep(kinds)).limit - 1
            rights = [self._right(length, repeats) for length in self.lens[-1]]
            fed = zip(self.lens[-1], rights, strict=True)
            self.unread.append([(length, self.tier, right) for length, right in fed])
            lens = zip(self.lens[-1], rights, strict=True)
            self.lens.append([self._next(each + len(right) + 1, repeats) for each, right in lens])
            self.lens.popleft()
            num_tokens += sum(map(len, rights)) + self.num_reqs
            ms += self.prices.round_ms(upcoming, self.tier)
            if len(self.unread) == LAG:
                self._read(self.unread.popleft())
            self.tier = next_tier
        return num_tokens / self.num_reqs / (ms / PLAIN_MS)

    def _read(self, requests: list[tuple[int, int, list[int]]]) -> None:
        lens, fed, rights = zip(*requests, strict=True)
        kinds = [kind_of(length) for length in lens]
        paths = [[0, *(1 + place for place in right)] for right in rights]
        outcome = drafted(0, self.num_reqs, fed, [len(right) for right in rights], fed)
        result = replace(outcome.result, paths=paths)
        self.policy.observe(replace(outcome, result=result, kinds=kinds))

    def _right(self, match_len: int, repeats: bool) -> list[int]:
        """Places of the drafts that are right, of those that are fed."""
        chance = CHANCE[class_of(match_len)]
        if repeats:
            chance = 0.97 if match_len > 4 else 0.5
        order = CHAIN
        if self.has_trees:
            order = REPEATED_NODES if repeats else NOVEL_NODES
        branch, num_right = 0, right_drafts(self.random, MAX_DRAFTS, chance)
        if num_right == 0:
            branch = self.random.choice([1, 2, 3])
            num_right = right_drafts(self.random, MAX_DRAFTS, chance / 2)
        right = {(branch, place) for place in range(num_right)}
        return [place for place, node in enumerate(order[: self.tier]) if node in right]

    def _next(self, match_len: int, repeats: bool) -> int:
        if repeats or self.random.random() < 0.05:
            return min(LONGEST, match_len)
        return self.random.choice([0, 1, 1, 2])


def decoding(per_row: float, num_reqs: int, has_trees: bool = False) -> Decoding:
    prices = Prices(per_row)
    options = RoundOptions(MAX_DRAFTS, num_free=MAX_DRAFTS, trees_of_any_size=has_trees)
    policy = MatchedDrafts(PolicyParts(options=options, rounds=prices))
    return Decoding(policy, prices, num_reqs, has_trees)


BOTH = pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])


@BOTH
@pytest.mark.parametrize("num_reqs", [1, 8, 32])
@pytest.mark.parametrize("per_row", [0.003, 0.01, 0.03])
def test_where_nothing_is_repeated_it_costs_next_to_nothing(
    per_row: float, num_reqs: int, has_trees: bool
) -> None:
    requests = decoding(per_row, num_reqs, has_trees)
    assert requests.run(300, repeats=False) > 0.985
    assert requests.run(1000, repeats=False) > 0.993


@pytest.mark.parametrize(
    ("per_row", "num_reqs", "least", "has_trees"),
    [
        *((0.003, 1, 7, False), (0.01, 1, 7, False), (0.003, 8, 6, False)),
        *((0.003, 1, 5.5, True), (0.01, 1, 5.5, True), (0.003, 8, 5, True)),
    ],
)
def test_repetition_is_made_use_of_within_a_few_steps(
    per_row: float, num_reqs: int, least: float, has_trees: bool
) -> None:
    requests = decoding(per_row, num_reqs, has_trees)
    requests.run(500, repeats=False)
    assert requests.run(12, repeats=True) > 2
    assert requests.run(200, repeats=True) > least


@BOTH
@pytest.mark.parametrize(("per_row", "num_reqs"), [(0.003, 1), (0.01, 1), (0.003, 8)])
def test_its_end_costs_a_few_steps(per_row: float, num_reqs: int, has_trees: bool) -> None:
    requests = decoding(per_row, num_reqs, has_trees)
    requests.run(300, repeats=True)
    assert requests.run(512, repeats=False) > 0.985


@BOTH
def test_where_rows_are_dear_nothing_is_drafted(has_trees: bool) -> None:
    requests = decoding(1.0, 4, has_trees)
    requests.run(100, repeats=True)
    assert requests.tier == 0
