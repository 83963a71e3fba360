"""What requests that accept differently say of other numbers of drafts, against a closed loop in
which these were drafted."""

from __future__ import annotations

import random

import pytest

from sglang.srt.speculative.request_mix import MAX_ENDED, RequestMix

EASY, HARD, SHARE = 0.95, 0.15, 0.4  # that a draft is right; share of requests that are easy
NUM_ROWS, NUM_NEW, NUM_STEPS, MOST = 16, 96, 1500, 7


class Loop:
    """Requests of two kinds, each of which is replaced by another one when it ends."""

    def __init__(self, tier: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.tier = tier
        self.mix = RequestMix(NUM_ROWS)
        self._survival = [0.0] * NUM_ROWS
        self._left = [0] * NUM_ROWS
        self.num_tokens = self.num_rounds = 0
        self.sums = [0.0] * (1 + MOST)  # of what each number of drafts would have given just then
        for row in range(NUM_ROWS):
            self._begin(row)

    def _begin(self, row: int) -> None:
        self.mix.admit(row)
        self._survival[row] = EASY if self._random.random() < SHARE else HARD
        self._left[row] = NUM_NEW

    def step(self) -> None:
        found = [self._num_right(survival) for survival in self._survival]
        rows, given = list(range(NUM_ROWS)), [1 + right for right in found]
        self.mix.observe(rows, [self.tier] * NUM_ROWS, found, given)
        for row, (survival, right) in enumerate(zip(self._survival, found, strict=True)):
            self.num_rounds += 1
            self.num_tokens += 1 + right
            for count in range(1 + MOST):
                self.sums[count] += sum(survival**place for place in range(1 + count))
            self._left[row] -= 1 + right
            if self._left[row] <= 0:
                self._begin(row)

    def _num_right(self, survival: float) -> int:
        right = 0
        while right < self.tier and self._random.random() < survival:
            right += 1
        return right

    @property
    def length(self) -> float:
        """Tokens per round and request."""
        return self.num_tokens / self.num_rounds


@pytest.fixture(scope="module")
def loops() -> dict[int, Loop]:
    found = {tier: Loop(tier) for tier in (1, 3, 7)}
    for loop in found.values():
        for _ in range(NUM_STEPS):
            loop.step()
    return found


@pytest.mark.parametrize("drafted", [1, 3, 7])
@pytest.mark.parametrize("asked", [1, 3, 7])
def test_other_numbers_of_drafts_are_foretold(
    loops: dict[int, Loop], drafted: int, asked: int
) -> None:
    loop, rows = loops[drafted], list(range(NUM_ROWS))
    seen = [total / loop.num_rounds for total in loop.sums]
    factors = [0.0] * (1 + MOST)
    for _ in range(50):  # the requests at hand are few
        for _ in range(20):
            loop.step()
        now = loop.mix.factors(rows, MOST)
        factors = [total + factor / 50 for total, factor in zip(factors, now, strict=True)]
    right = loops[asked].length
    assert seen[asked] * factors[asked] == pytest.approx(right, rel=0.15)
    if asked != drafted:
        off = abs(seen[asked] / right - 1)
        assert off > 1.5 * abs(seen[asked] * factors[asked] / right - 1), "what this is for"


def test_requests_that_are_alike_change_nothing() -> None:
    mix = RequestMix(4)
    assert mix.factors([0, 1], 5) == [1.0] * 6, "nothing is known"
    for _ in range(40):
        mix.observe([0, 1, 2, 3], [3] * 4, [2] * 4, [3] * 4)
    assert mix.factors([0, 1, 2, 3], 5) == pytest.approx([1.0] * 6)


def test_steps_without_drafts_tell_how_long_requests_stay() -> None:
    """Easy and hard requests give as many tokens then, so what drafts would give is the mean of
    times, not of tokens."""
    mix = RequestMix(2)
    for _ in range(10):
        mix.observe([0, 1], [2, 2], [2, 0], [3, 1])
    for _ in range(2000):
        mix.observe([0, 1], [0, 0], [0, 0], [1, 1])
    [_, one, two] = mix.factors([0, 1], 2)
    easy, hard = (20 + 6 * 21 / 32) / 26, (6 * 21 / 32) / 16  # as each of them is thought of
    lengths = [1 + easy + easy**2, 1 + hard + hard**2]
    lasting = (2030 + 2010) / (2030 / lengths[0] + 2010 / lengths[1])
    assert two == pytest.approx(lasting / (sum(lengths) / 2))
    assert two < one < 1.0


def test_what_is_remembered_of_ended_requests_is_bounded() -> None:
    mix = RequestMix(1)
    for _ in range(3 * MAX_ENDED):
        mix.observe([0], [1], [1], [2])
        mix.admit(0)
    assert len(mix._ended) == MAX_ENDED
    mix.admit(0)
    assert len(mix._ended) == MAX_ENDED, "one that verified nothing says nothing"
