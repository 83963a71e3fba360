"""Measures tokens per second of the last seconds, as a gauge shows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 5.0
SLICE_S = 0.1  # totals of one slice become one, so a window of short steps is no longer than others


class Throughput:
    """Measures tokens per second of the last `WINDOW_S`; 0 if nothing came in them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._totals: deque[tuple[float, int]] = deque()  # the first one begins the window
        self._total = 0

    def begin(self) -> None:
        """Begins work after an idle time, which is left out if it was long."""
        now_s = self._clock()
        if not self._totals or self._totals[-1][0] < now_s - WINDOW_S:
            self._totals = deque([(now_s, self._total)])

    def add(self, total: int) -> None:
        """Notes the tokens generated since the start."""
        now_s, totals = self._clock(), self._totals
        self._total = total
        if len(totals) > 1 and now_s - totals[-2][0] < SLICE_S:
            totals[-1] = now_s, total
        else:
            totals.append((now_s, total))
        self._drop_old(now_s)

    @property
    def tokens_per_s(self) -> float:
        if not self._totals:
            return 0.0
        self._drop_old(self._clock())
        (start_s, start), (end_s, end) = self._totals[0], self._totals[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0

    def _drop_old(self, now_s: float) -> None:
        while len(self._totals) > 1 and self._totals[1][0] <= now_s - WINDOW_S:
            self._totals.popleft()
