"""Stop strings and stop expressions in a growing text: what ends it, and what may not be shown yet.

Expressions run over the last `WINDOW_CHARS` characters. Each request has a budget of CPU time for
them, and what the searches of a token take beyond `OWN_S` also comes out of a budget that all
requests of the process share, so neither one expression nor many can hold a process up.
`stop_expressions` says which expressions are refused.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import regex

from sglang.srt.stop_expressions import compiled

WINDOW_CHARS = 1024
# CPU time for a request's searches: the budget at first and at most, and what each search adds.
BUDGET_S = 0.05
REFILL_S = 0.001
# CPU time for the searches of a token that no other request can use up: some ten usual expressions.
OWN_S = 0.0002
# CPU time that all requests share for what these take beyond it: the budget at most, and how much
# of each second that passes is added to it.
SHARED_S = 0.25
SHARED_REFILL_SHARE = 0.05


class StopFound(NamedTuple):
    """A stop in a text.

    Attributes:
        start: where the stop begins.
        matched: the stop string, or the expression.
    """

    start: int
    matched: str


class SharedTime:
    """CPU time that the requests of a process have together for searches slower than usual."""

    def __init__(self) -> None:
        self._left_s = SHARED_S
        self._seen_s = time.monotonic()

    @property
    def left_s(self) -> float:
        now_s = time.monotonic()
        self._left_s = min(SHARED_S, self._left_s + SHARED_REFILL_SHARE * (now_s - self._seen_s))
        self._seen_s = now_s
        return self._left_s

    def take(self, time_s: float) -> None:
        self._left_s -= time_s


_shared_time = SharedTime()


class StopSet:
    """The stop strings and expressions of one request.

    Expressions are compiled by the first search. Searches raise TimeoutError when the expressions
    have used up their time.

    Attributes:
        num_exempt: characters at the beginning of the text, those before min_new_tokens. A stop
            string must end after them, and what an expression matches must begin there.
    """

    def __init__(self, strings: Sequence[str], expressions: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        self._expressions = tuple(expressions)
        self._longest = max(map(len, strings), default=0)
        self._left_s = BUDGET_S
        self._own_s = 0.0  # part of `_left_s` that does not come out of the shared budget
        self.num_exempt = 0

    def __bool__(self) -> bool:
        return bool(self._strings or self._expressions)

    @functools.cached_property
    def _patterns(self) -> list[regex.Pattern[str]]:
        return [compiled(text) for text in self._expressions]

    def find(self, text: str, num_seen: int) -> StopFound | None:
        """The first stop in `text`, of which the first `num_seen` characters hold no whole one; of
        two at one place, the longer."""
        self._left_s = min(self._left_s + REFILL_S, BUDGET_S)
        self._own_s = OWN_S
        start = max(0, num_seen - self._longest + 1)
        hits = [
            (text.find(stop, max(start, self.num_exempt - len(stop) + 1)), -len(stop), stop)
            for stop in self._strings
        ]
        hits = [hit for hit in hits if hit[0] >= 0]
        for pattern in self._patterns:
            match = self._search(pattern, text)
            if match is not None:
                hits.append((match.start(), -len(match.group()), pattern.pattern))
        first = min(hits, default=None)
        return None if first is None else StopFound(first[0], first[2])

    def num_safe_chars(self, text: str) -> int:
        """Counts the characters of `text`, which holds no whole stop, that cannot become part of
        one."""
        end = len(text) - self._partial_string_len(text)
        for pattern in self._patterns:
            match = self._search(pattern, text, partial=True)
            if match is not None:
                end = min(end, match.start())
        return end

    def _search(
        self, pattern: regex.Pattern[str], text: str, partial: bool = False
    ) -> regex.Match[str] | None:
        left_s = min(self._left_s, self._own_s + max(0.0, _shared_time.left_s))
        if left_s <= 0:
            raise TimeoutError("the request's time for stop expressions is used up")
        start_s = time.thread_time()
        try:
            window_start = max(self.num_exempt, len(text) - WINDOW_CHARS)
            return pattern.search(text, pos=window_start, partial=partial, timeout=left_s)
        finally:
            used_s = time.thread_time() - start_s
            self._left_s -= used_s
            _shared_time.take(max(0.0, used_s - self._own_s))
            self._own_s = max(0.0, self._own_s - used_s)

    def _partial_string_len(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > length and text.endswith(stop[:length]) for stop in self._strings):
                return length
        return 0
