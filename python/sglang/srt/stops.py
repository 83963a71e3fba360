"""Stop strings and stop expressions in a growing text: what ends it, and what may not be shown yet.

Expressions run over the last `WINDOW_CHARS` characters on a time budget of the request, so none can
hold a process up. Refused are those that match the empty text, since they would end every output,
and those that repeat groups within groups too often: the regex module copies what is repeated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import regex

WINDOW_CHARS = 1024
# CPU time of a request's searches: at first, at most, and what every search of new text adds again.
BUDGET_S = 0.05
REFILL_S = 0.0005
EMPTY_MATCH_TIMEOUT_S = 0.05
MAX_GROUP_COPIES = 256
MAX_GROUPS = 64

_GROUP_REPEAT = re.compile(r"\)\s*(?:(\+)|\{\s*([0-9]*)\s*,?\s*([0-9]*)\s*\})")
_VERBOSE_OR_COMMENT = re.compile(r"\(\?(?:#|[a-zA-Z0-9-]*x)")


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

    Searches raise TimeoutError when the expressions have used up their time.
    """

    def __init__(self, strings: Sequence[str], expressions: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        # Not cached: a pattern can hold megabytes, and lives as long as its request.
        self._patterns = [regex.compile(text, cache_pattern=False) for text in expressions]
        self._longest = max(map(len, strings), default=0)
        self._left_s = BUDGET_S

    def __bool__(self) -> bool:
        return bool(self._strings or self._patterns)

    def find(self, text: str, num_seen: int) -> StopFound | None:
        """The first stop in `text`, of which the first `num_seen` characters hold no whole one; of
        two at one place, the longer."""
        self._left_s = min(self._left_s + REFILL_S, BUDGET_S)
        start = max(0, num_seen - self._longest + 1)
        hits = [(text.find(stop, start), -len(stop), stop) for stop in self._strings]
        hits = [hit for hit in hits if hit[0] >= 0]
        for pattern in self._patterns:
            match = self._search(pattern, text)
            if match is not None:
                hits.append((match.start(), -len(match.group()), pattern.pattern))
        first = min(hits, default=None)
        return None if first is None else StopFound(first[0], first[2])

    def num_safe_chars(self, text: str) -> int:
        """How much of `text`, which holds no whole stop, cannot become part of one."""
        end = len(text) - self._partial_string_len(text)
        for pattern in self._patterns:
            match = self._search(pattern, text, partial=True)
            if match is not None:
                end = min(end, match.start())
        return end

    def _search(
        self, pattern: regex.Pattern[str], text: str, partial: bool = False
    ) -> regex.Match[str] | None:
        if self._left_s <= 0:
            raise TimeoutError("the request's time for stop expressions is used up")
        start_s = time.thread_time()
        try:
            window_start = max(0, len(text) - WINDOW_CHARS)
            return pattern.search(text, pos=window_start, partial=partial, timeout=self._left_s)
        finally:
            self._left_s -= time.thread_time() - start_s

    def _partial_string_len(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > length and text.endswith(stop[:length]) for stop in self._strings):
                return length
        return 0


def check_expressions(expressions: Sequence[str]) -> None:
    """Refuses stop expressions of one request that cannot be used.

    Raises:
        ValueError: if one is no regular expression, matches the empty text or cannot be judged, or
            if all together would be large once compiled.
    """
    if sum(map(_num_group_copies, expressions)) > MAX_GROUP_COPIES:
        raise ValueError(
            f"repeats groups more than {MAX_GROUP_COPIES} times (the counts of nested groups"
            " multiply); use smaller counts"
        )
    for text in expressions:
        try:
            pattern = regex.compile(text, cache_pattern=False)
            matches_empty = pattern.search("", timeout=EMPTY_MATCH_TIMEOUT_S) is not None
        except Exception as error:  # noqa: BLE001 - a client's text; the library's errors are many
            raise ValueError(f"is not a usable regular expression ({error})") from None
        if matches_empty:
            raise ValueError("matches the empty text")


def _num_group_copies(text: str) -> int:
    """Upper bound of the copies of one group that compiling makes, as if all groups were nested."""
    if text.count("(") > MAX_GROUPS:
        raise ValueError(f"has more than {MAX_GROUPS} groups; use fewer")
    if _VERBOSE_OR_COMMENT.search(text):
        raise ValueError("must not use the x flag or comments; write it without")
    copies = 1
    for plus, low, high in _GROUP_REPEAT.findall(text):
        copies *= 2 if plus else max(1, int(low or 1), int(high or 1))
    return copies
