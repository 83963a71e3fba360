"""How many tokens rounds give requests, as rows tell."""

from __future__ import annotations

import math

import pytest

from sglang.srt.speculative.request_ends import MEMORY_ENDED, RequestEnds


def test_nothing_is_known_before_a_row_is_another_request_s() -> None:
    ends = RequestEnds(2)
    ends.admit(0, 10)
    ends.observe([0], [4])
    assert ends.tokens_of_rounds == math.inf
    ends.admit(1, 10)
    assert ends.tokens_of_rounds == math.inf
    ends.admit(0, 10)
    assert ends.tokens_of_rounds == 3, "the first one came with the prompt"


def test_tokens_beyond_the_most_are_not_counted() -> None:
    ends = RequestEnds(2)
    ends.admit(0, 6)
    ends.admit(1, 100)
    assert ends.observe([1, 0], [1, 1]) == 2
    assert ends.observe([1, 0], [4, 4]) == 8
    assert ends.observe([1, 0], [4, 4]) == 5
    assert ends.observe([1, 0], [4, 4]) == 4, "one was launched before the end had been read"
    ends.admit(0, 6)
    assert ends.tokens_of_rounds == 5


def test_requests_without_rounds_tell_nothing() -> None:
    """As those of one token, or of which only chunks were read."""
    ends = RequestEnds(1)
    for num_tokens in (1, 0):
        ends.admit(0, 1)
        ends.observe([0], [num_tokens])
    ends.admit(0, 1)
    assert ends.tokens_of_rounds == math.inf


def test_what_ended_long_ago_is_forgotten() -> None:
    ends = RequestEnds(1)
    for num_tokens in (101, 21):
        for _ in range(6 * MEMORY_ENDED):
            ends.admit(0, 200)
            ends.observe([0], [num_tokens])
    ends.admit(0, 200)
    assert ends.tokens_of_rounds == pytest.approx(20, rel=0.02)
