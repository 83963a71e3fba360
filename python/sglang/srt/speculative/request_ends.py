"""Follows how many tokens rounds give requests before these end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sglang.srt.speculative.prompt_mix import Mean

MEMORY_ENDED = 64  # requests that have ended and are remembered


class RequestEnds:
    """Counts the tokens that requests are given, row by row. A request has ended when its row is
    given to another one. A retracted request counts as ended, and as another one when it has a row
    again.

    Args:
        num_rows: of the page table.
    """

    def __init__(self, num_rows: int) -> None:
        self._given = np.zeros(num_rows, np.int64)
        self._most = np.zeros(num_rows, np.int64)
        self._ended = Mean(MEMORY_ENDED)

    @property
    def tokens_of_rounds(self) -> float:
        """Returns the mean number of tokens of requests that had rounds and have ended; infinite
        before one has."""
        return self._ended.value if self._ended.count else math.inf

    def admit(self, row: int, max_new_tokens: int) -> None:
        """A request has got a row."""
        by_rounds = int(self._given[row]) - 1  # the first token is given with the prompt
        if by_rounds > 0:
            self._ended.add(by_rounds)
        self._given[row], self._most[row] = 0, max_new_tokens

    def observe(self, rows: Sequence[int], num_tokens: Sequence[int]) -> int:
        """Hears of a step how many tokens each of R rows was given. Returns how many of them are no
        more than the requests may have."""
        index = np.array(rows)
        before = self._given[index]
        after = np.minimum(before + np.array(num_tokens), self._most[index])
        self._given[index] = after
        return int((after - before).sum())
