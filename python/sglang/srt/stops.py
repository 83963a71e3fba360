"""Stop strings and stop expressions in a growing text: what ends it, and what may not be shown yet.

Expressions run under a time limit over the last `WINDOW_CHARS` characters, so no request can hold a
process up; an expression that matches the empty text is refused, since it would end every output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import regex

WINDOW_CHARS = 1024
MATCH_TIMEOUT_S = 0.05


class StopFound(NamedTuple):
    """A stop in a text.

    Attributes:
        start: where the stop begins.
        matched: the stop string, or the expression.
    """

    start: int
    matched: str


class StopSet:
    """The stop strings and expressions of one request.

    Searches raise TimeoutError when an expression takes more than `MATCH_TIMEOUT_S`.
    """

    def __init__(self, strings: Sequence[str], expressions: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        self._patterns = [compile_expression(text) for text in expressions]
        self._longest = max(map(len, strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings or self._patterns)

    def find(self, text: str, num_seen: int) -> StopFound | None:
        """The first stop in `text`, of which the first `num_seen` characters hold no whole one; of
        two at one place, the longer."""
        start = max(0, num_seen - self._longest + 1)
        hits = [(text.find(stop, start), -len(stop), stop) for stop in self._strings]
        hits = [hit for hit in hits if hit[0] >= 0]
        for pattern in self._patterns:
            match = pattern.search(text, pos=_window_start(text), timeout=MATCH_TIMEOUT_S)
            if match is not None:
                hits.append((match.start(), -len(match.group()), pattern.pattern))
        first = min(hits, default=None)
        return None if first is None else StopFound(first[0], first[2])

    def num_safe_chars(self, text: str) -> int:
        """How much of `text`, which holds no whole stop, cannot become part of one."""
        end = len(text) - self._partial_string_len(text)
        for pattern in self._patterns:
            match = pattern.search(
                text, pos=_window_start(text), partial=True, timeout=MATCH_TIMEOUT_S
            )
            if match is not None:
                end = min(end, match.start())
        return end

    def _partial_string_len(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > length and text.endswith(stop[:length]) for stop in self._strings):
                return length
        return 0


@functools.lru_cache(maxsize=1024)
def compile_expression(text: str) -> regex.Pattern[str]:
    """Compiles a stop expression.

    Raises:
        ValueError: if it is no regular expression, or matches the empty text.
    """
    try:
        pattern = regex.compile(text)
        if pattern.search("", timeout=MATCH_TIMEOUT_S) is not None:
            raise ValueError("matches the empty text")
    except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
        raise ValueError(f"is not a usable regular expression ({error})") from None
    return pattern


def _window_start(text: str) -> int:
    return max(0, len(text) - WINDOW_CHARS)
