"""`Stretches` beside texts that are drawn by its own two chances: what it says of a number of
drafts is what rounds of that number give, though it learnt from rounds of another number."""

from __future__ import annotations

import random

import pytest

from sglang.srt.lookahead import stretches
from sglang.srt.lookahead.stretches import Stretches

MOST = 7
NUM_ROWS = 32
TEXTS = [(0.1, 0.9), (0.3, 0.5), (0.6, 0.6), (0.9, 0.3), (0.05, 0.97)]


class DrawnText:
    """Requests whose tokens are predictable in stretches.

    Args:
        begin, stay: chances that a token is predictable after one that is not, and after one that
            is.
    """

    def __init__(self, begin: float, stay: float, seed: int) -> None:
        self._begin, self._stay, self._luck = begin, stay, random.Random(seed)
        self._was_predictable = [False] * NUM_ROWS

    def round(self, row: int, num_drafts: int) -> int:
        """Returns how many drafts of a request are right; the token after them is the model's."""
        right = 0
        while right < num_drafts and self._next(row):
            right += 1
        if right == num_drafts:  # else the token after them is the one that was not predictable
            self._next(row)
        return right

    def _next(self, row: int) -> bool:
        chance = self._stay if self._was_predictable[row] else self._begin
        self._was_predictable[row] = self._luck.random() < chance
        return self._was_predictable[row]


def mean_length(text: DrawnText, num_drafts: int, num_rounds: int = 1500) -> float:
    rounds = [text.round(row, num_drafts) for _ in range(num_rounds) for row in range(NUM_ROWS)]
    return 1 + sum(rounds) / len(rounds)


def learnt(begin: float, stay: float, num_drafts: int, num_rounds: int, seed: int) -> Stretches:
    found, text, rows = Stretches(NUM_ROWS), DrawnText(begin, stay, seed), range(NUM_ROWS)
    for _ in range(num_rounds):
        right = [text.round(row, num_drafts) for row in rows]
        found.observe(rows, [num_drafts] * NUM_ROWS, right, [num_drafts] * NUM_ROWS)
    return found


@pytest.mark.long_matrix
@pytest.mark.parametrize("num_drafts", [2, 3, 7])
@pytest.mark.parametrize(("begin", "stay"), TEXTS)
def test_rounds_of_any_number_of_drafts_give_what_it_says(
    begin: float, stay: float, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it forgot nothing: it remembers few steps, whose shares go up and down."""
    monkeypatch.setattr(stretches, "MEMORY_STEPS", 1e6)
    monkeypatch.setattr(stretches, "PAST_MEMORY", 1e6)
    said = learnt(begin, stay, num_drafts, 1500, 0).lengths(MOST)
    for drafts in (1, 3, MOST):
        given = mean_length(DrawnText(begin, stay, 100 + drafts), drafts)
        assert said[drafts] == pytest.approx(given, rel=0.04)


def test_more_drafts_never_give_less_and_none_give_one_token() -> None:
    for begin, stay in TEXTS:
        lengths = learnt(begin, stay, 5, 20, 0).lengths(MOST)
        assert lengths[0] == 1.0
        assert lengths == sorted(lengths)


def test_text_that_changes_is_believed_within_some_steps() -> None:
    found, rows = learnt(0.9, 0.95, 7, 50, 0), range(NUM_ROWS)
    assert found.lengths(MOST)[7] > 5
    text = DrawnText(0.05, 0.2, 1)
    for _ in range(20):
        right = [text.round(row, 7) for row in rows]
        found.observe(rows, [7] * NUM_ROWS, right, [7] * NUM_ROWS)
    assert found.lengths(MOST)[7] < 1.6


def test_new_requests_are_like_all_before_them_at_first() -> None:
    """Not like those that ran last; and what these say is believed at once."""
    found, rows = learnt(0.9, 0.95, 7, 50, 0), range(NUM_ROWS)
    none, three = [0] * NUM_ROWS, [3] * NUM_ROWS
    for _ in range(6):  # text that is wrong for some steps, of many that were right
        found.observe(rows, three, none, three)
    before = found.lengths(MOST)[3]
    found.renew()
    renewed = found.lengths(MOST)[3]
    assert renewed > before + 0.3
    for _ in range(2):
        found.observe(rows, three, none, three)
    assert found.lengths(MOST)[3] < renewed - 0.3


def test_steps_without_drafts_leave_chances_and_forget_slowly() -> None:
    found, rows = learnt(0.2, 0.8, 3, 50, 0), range(NUM_ROWS)
    before = found.lengths(MOST)
    none = [0] * NUM_ROWS
    for _ in range(5):
        found.observe(rows, none, none, none)
    assert found.lengths(MOST) == pytest.approx(before, rel=0.05)


def test_a_new_request_begins_after_no_full_round() -> None:
    """Its first draft says where stretches begin, though its row's last request was in one."""
    one, two = Stretches(1), Stretches(1)
    for each in (one, two):
        for _ in range(8):
            each.observe([0], [3], [3], [3])
    one.observe([0], [0], [0], [0])  # its prompt
    for each in (one, two):
        each.observe([0], [3], [0], [3])
    assert one.lengths(MOST)[1] < two.lengths(MOST)[1]
