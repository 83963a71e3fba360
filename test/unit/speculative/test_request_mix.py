"""What rounds of any number of drafts would give, by what was right in rounds of others, against
rounds over the same texts in which so many were drafted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest

from sglang.srt.speculative.request_mix import MAX_ENDED, PAST, TOKENS, WINDOW, RequestMix

NUM_ROWS, NUM_NEW, MOST = 16, 96, 7
ALL_ROWS = range(NUM_ROWS)


class Text(NamedTuple):
    """Chances that a token is predictable: behind a predictable one, and behind another one."""

    stay: float
    begin: float

    def tokens(self, luck: random.Random) -> list[bool]:
        """Which tokens of a request are predictable, some more than it needs."""
        found, is_predictable = [], luck.random() < self.begin / (1 - self.stay + self.begin)
        for _ in range(NUM_NEW + MOST + 1):
            found.append(is_predictable)
            is_predictable = luck.random() < (self.stay if is_predictable else self.begin)
        return found


EVEN, BURSTS = Text(0.5, 0.5), Text(0.85, 0.12)
EASY, HARD = Text(0.95, 0.95), Text(0.3, 0.1)
MIXES = {"even": [EVEN], "bursts": [BURSTS], "two kinds": [EASY, HARD], "all": [EASY, HARD, BURSTS]}


class Loop:
    """Requests, each of which is replaced by another one when it ends; `tiers` are the numbers of
    drafts of the steps, again and again. Of these a step feeds `most_fed`, and what would have
    become of the others is guessed right."""

    def __init__(
        self,
        texts: Sequence[Text],
        tiers: Sequence[int],
        seed: int = 0,
        most_fed: int = MOST,
        num_rows: int = NUM_ROWS,
    ) -> None:
        self.most_fed, self._num_rows = most_fed, num_rows
        self.mix = RequestMix(num_rows)
        self.texts = texts
        self.tiers = itertools.cycle(tiers)
        self._luck = random.Random(seed)
        self._left = [self._new() for _ in range(num_rows)]
        self.num_tokens = self.num_rounds = 0

    def _new(self) -> list[bool]:
        return self._luck.choice(self.texts).tokens(self._luck)

    def step(self) -> None:
        num_drafts = next(self.tiers)
        found, given, num_fed = [], [], min(num_drafts, self.most_fed)
        for row, left in enumerate(self._left):
            found.append([*left[:num_drafts], False].index(False))
            given.append(1 + min(found[-1], num_fed))
            self._left[row] = left[given[-1] :]
        counts, fed = [num_drafts] * self._num_rows, [num_fed] * self._num_rows
        self.mix.observe(range(self._num_rows), counts, found, given, fed)
        self.num_tokens += sum(given)
        self.num_rounds += self._num_rows
        for row, left in enumerate(self._left):
            if len(left) <= MOST:
                self._left[row] = self._new()
                self.mix.admit(row)

    def change_to(self, text: Text) -> None:
        """What is left of all requests is of this text, and those that come are."""
        self.texts = [text]
        self._left = [self._new() for _ in self._left]

    def lengths(self, num_steps: int = 600) -> list[float]:
        """Their mean over so many steps, once something is known: requests at hand are few."""
        for _ in range(100):
            self.step()
        sums = [0.0] * (1 + MOST)
        for _ in range(num_steps // 10):
            for _ in range(10):
                self.step()
            found = self.mix.lengths(range(self._num_rows), MOST)
            sums = [total + each for total, each in zip(sums, found, strict=True)]
        return [total / (num_steps // 10) for total in sums]


def given_per_round(texts: Sequence[Text], num_drafts: int) -> float:
    loop = Loop(texts, [num_drafts], seed=1)
    for _ in range(3000):
        loop.step()
    return loop.num_tokens / loop.num_rounds


@pytest.mark.parametrize("mix", MIXES)
def test_other_numbers_of_drafts_are_foretold(mix: str) -> None:
    texts = MIXES[mix]
    right = {count: given_per_round(texts, count) for count in (1, 3, 7)}
    for drafted in ([1], [3], [7], [0, 0, 0, 3], [1, 1, 1, 1, 7]):
        lengths = Loop(texts, drafted).lengths()
        assert lengths[0] == pytest.approx(1.0)
        assert lengths == sorted(lengths)
        # Of single drafts it is a guess how long stretches are.
        near = 0.15 if max(drafted) == 1 or drafted[0] == 0 else 0.08
        for count, length in right.items():
            assert lengths[count] == pytest.approx(length, rel=near), (drafted, count)


@cache
def endless(text: Text, num_drafts: int) -> float:
    return given_per_round([text], num_drafts)


def useful_per_round(text: Text, num_drafts: int, num_new: int, num_late: int) -> float:
    """Of requests that have about so many tokens, and are in so many rounds after the last one
    unless it was sure to be the last."""
    luck, num_rounds, num_tokens = random.Random(2), 0, 0
    for _ in range(3000):
        left, place, end = text.tokens(luck), 0, num_new + luck.randint(-4, 4)
        num_tokens += end
        while place < end:
            is_sure = place == end - 1
            place += 1 + [*left[place : place + num_drafts], False].index(False)
            num_rounds += 1
        num_rounds += 0 if is_sure else num_late
    return num_tokens / num_rounds


@pytest.mark.parametrize("num_late", [0, 1])
@pytest.mark.parametrize("num_new", [20, 32])
@pytest.mark.parametrize("text", [EVEN, BURSTS, EASY, HARD])
def test_tokens_beyond_the_ends_of_requests_are_left_out(
    text: Text, num_new: int, num_late: int
) -> None:
    loop = Loop([text], [3, 3, 7])
    loop.lengths(1000)
    found = loop.mix.lengths(ALL_ROWS, MOST, num_new, num_late)
    whole = loop.mix.lengths(ALL_ROWS, MOST)
    assert found[0] == pytest.approx(whole[0]), "each end is sure"
    for count in (1, 3, 7):
        truth = useful_per_round(text, count, num_new, num_late) / endless(text, count)
        lost, truly_lost = 1 - found[count] / whole[count], 1 - truth
        assert lost == pytest.approx(truly_lost, rel=0.35, abs=0.02), count
        assert num_late == 0 or count < 3 or text == HARD or truly_lost > 0.025, "it matters"


def test_lengths_of_short_requests_grow_with_the_drafts() -> None:
    for text in (EVEN, BURSTS, EASY, HARD):
        loop = Loop([text], [3, 3, 7])
        loop.lengths(300)
        for num_new in (1, 2, 8, 20):
            lengths = loop.mix.lengths(ALL_ROWS, MOST, num_new, 1)
            assert lengths == sorted(lengths), (text, num_new)


def test_what_was_right_in_rounds_of_few_drafts_says_too_much_of_many() -> None:
    """What all this is for: the share of drafts right at each place of a chain, multiplied."""
    loop = Loop([BURSTS], [1, 1, 1, 1, 7])
    tried, right = [0] * MOST, [0] * MOST
    observe = loop.mix.observe

    def watched(
        rows: Sequence[int], counts: list[int], found: list[int], given: list[int], fed: list[int]
    ) -> None:
        observe(rows, counts, found, given, fed)
        for count, confirmed in zip(counts, found, strict=True):
            for place in range(min(count, confirmed + 1)):
                tried[place] += 1
                right[place] += place < confirmed

    vars(loop.mix)["observe"] = watched
    foretold = loop.lengths()[MOST]
    shares = [of / all_of for of, all_of in zip(right, tried, strict=True)]
    multiplied = 1 + sum(itertools.accumulate(shares, float.__mul__))
    truth = given_per_round([BURSTS], MOST)
    assert multiplied > 1.1 * truth
    assert abs(foretold / truth - 1) < 0.06


def test_pairs_of_single_drafts_among_steps_without_foretell_rounds_of_one() -> None:
    """One alone says how often tokens are predictable, and rounds of drafts meet fewer of these."""
    for text in (BURSTS, Text(0.7, 0.2)):
        truth = given_per_round([text], 1)
        alone, pairs = (Loop([text], [0] * 40 + [1] * count) for count in (1, 2))
        assert alone.lengths(2000)[1] > 1.06 * truth
        assert pairs.lengths(2000)[1] == pytest.approx(truth, rel=0.04)


@pytest.mark.parametrize("most_fed", [0, 1, 2])
def test_steps_that_were_cut_foretell_what_others_give(most_fed: int) -> None:
    for text in (EVEN, BURSTS):
        lengths = Loop([text], [5], most_fed=most_fed).lengths()
        assert lengths[5] == pytest.approx(given_per_round([text], 5), rel=0.06), text


@pytest.mark.parametrize("num_rows", [64, 256])
def test_large_batches_of_requests_that_differ_are_no_change_of_text(num_rows: int) -> None:
    luck, mix, num_changes = random.Random(0), RequestMix(num_rows), 0
    chances = [luck.uniform(0.4, 0.9) for _ in range(num_rows)]
    for step in range(400):
        right = [
            next((place for place in range(3) if luck.random() > chance), 3) for chance in chances
        ]
        mix.observe(range(num_rows), [3] * num_rows, right, [1 + each for each in right])
        if step % 8 == 7:
            for row in range(step % 64, num_rows, 64):
                mix.admit(row)
                chances[row] = luck.uniform(0.4, 0.9)
        num_changes += step > 16 and not mix._past.any()
    assert num_changes <= 4


def test_without_any_draft_the_first_one_is_thought_to_be_likely_and_lengths_are_finite() -> None:
    mix = RequestMix(4)
    for _ in range(2):
        lengths = mix.lengths([0, 1], 63)
        assert lengths[0] == 1.0
        assert 1.4 < lengths[1] < 1.8
        assert lengths == sorted(lengths)
        assert lengths[-1] < 4
        mix.observe([0, 1], [0, 0], [0, 0], [1, 1])


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 7.0, 8.0), (0.0, 1.0, 1.05)])
def test_what_is_always_or_never_right(share: float, least: float, most: float) -> None:
    mix = RequestMix(4)
    for _ in range(100):
        mix.observe(range(4), [7] * 4, [int(7 * share)] * 4, [1 + int(7 * share)] * 4)
    assert least < mix.lengths(range(4), 7)[7] <= most


def test_steps_without_drafts_tell_how_long_requests_stay() -> None:
    """Easy and hard requests give as many tokens then, so what drafts would give is the mean of
    times, not of tokens."""

    def found(num_plain: int) -> float:
        mix = RequestMix(2)
        for _ in range(30):
            mix.observe([0, 1], [2, 2], [2, 0], [3, 1])
        for _ in range(num_plain):
            mix.observe([0, 1], [0, 0], [0, 0], [1, 1])
        return mix.lengths([0, 1], 2)[2]

    assert found(0) > 1.2 * found(2000)


def test_text_that_changes_is_noticed_within_some_steps() -> None:
    for before, after in ((EASY, HARD), (HARD, EASY), (BURSTS, EASY)):
        loop = Loop([before], [3])
        loop.lengths(200)
        loop.change_to(after)
        for _ in range(30):
            loop.step()
        found = loop.mix.lengths(ALL_ROWS, 3)[3]
        assert found == pytest.approx(given_per_round([after], 3), rel=0.15), (before, after)


@pytest.mark.parametrize("seed", range(4))
def test_a_lone_request_is_soon_not_taken_for_those_of_other_text(seed: int) -> None:
    """Its own drafts say at once that it differs, which is no surprise for long."""
    more, fewer = Text(0.85, 0.7), Text(0.7, 0.35)
    for before, after in ((more, fewer), (fewer, more)):
        loop = Loop([before], [MOST], seed, num_rows=1)
        loop.lengths(1000)
        loop.change_to(after)
        for _ in range(600):
            loop.step()
        found = loop.mix.lengths([0], MOST)[MOST]
        assert found == pytest.approx(given_per_round([after], MOST), rel=0.2), (before, after)


def test_text_that_stays_is_not_forgotten() -> None:
    loop = Loop([BURSTS], [3])
    loop.lengths(200)
    num_changes = 0
    for _ in range(500):
        loop.step()
        num_changes += not loop.mix._past.any()
    assert num_changes <= 1, "A change was seen where there was none."


def test_what_is_remembered_is_bounded() -> None:
    mix = RequestMix(1)
    for _ in range(3 * MAX_ENDED):
        for _ in range(40):
            mix.observe([0], [3], [3], [4])
        mix.admit(0)
    assert mix._past[:TOKENS].max() <= PAST
    assert mix._known[:, TOKENS].sum() <= WINDOW
    before = mix._oldest
    mix.observe([0], [0], [0], [1])
    mix.admit(0)
    assert mix._oldest == before, "one that verified nothing says nothing"
