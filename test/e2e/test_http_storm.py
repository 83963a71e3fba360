"""Clients of every kind at once, over HTTP; longer by hand: `python test/http_storm.py`."""

from __future__ import annotations

import pytest

from http_storm import Right, is_right, storm_over_http
from target import TARGET

pytestmark = pytest.mark.long_matrix

SECONDS = 3.0


def test_texts_and_memory_survive_a_storm_over_http() -> None:
    seen = storm_over_http(0, SECONDS)
    wanted = ("length", "cancelled", "wrong bodies", "pauses", "stops", "half-closed")
    lacking = [name for name in wanted if seen[name] == 0]
    assert not lacking, seen


@pytest.mark.parametrize(
    ("tokens", "text", "is_drawn", "expected"),
    [
        ([1, 2, 3], "abc", False, True),
        ([1, 2], "ab", False, True),  # the beginning
        ([1, 2], "ax", False, None),
        ([1, 9, 3], "axc", False, False),  # a near-tie
        ([1, 2, 9], "abx", False, None),
        ([1, 2, 9], "abx", True, False),
        ([9, 9, 9], "xxx", False, None),  # before the near-tie
    ],
)
def test_other_tokens_are_right_from_a_near_tie_on(
    tokens: list[int], text: str, is_drawn: bool, expected: bool | None
) -> None:
    right = Right("abc", [1, 2, 3], [1.0, TARGET.max_gap / 2, 1.0])
    answer = {"output_ids": tokens, "text": text}
    if expected is None:
        with pytest.raises(AssertionError):
            is_right(right, answer, is_drawn)
    else:
        assert is_right(right, answer, is_drawn) is expected
