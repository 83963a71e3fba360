"""How long the next launch may wait for messages while the device computes.

Clients in a closed loop (agents, reinforcement learning) send their next request within a few
milliseconds of an answer. A step launched at once would run without it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from sglang.srt.step.worker import GenerationBatchResult

WINDOW = 8  # steps that are remembered
SHARE = 0.75  # of the host's spare time; the rest is for steps and launches that vary
MAX_WAIT_S = 0.005  # a client that sends nothing by then is not waited for


class LaunchSlack:
    """Watches a loop that launches each step before it reads the one before.

    The time that the host waits in a turn of that loop, for the device or for messages, is its
    spare time; planning, launching and reading are not part of it. A launch may wait for a share of
    the least spare time of the last turns. Where a step is ready before the host asks for it, the
    host sets the pace and has no spare time.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spare: deque[float] = deque(maxlen=WINDOW)
        self._waited_s = 0.0
        self._last_end_s: float | None = None

    def wait_for_step(self, step: GenerationBatchResult) -> float | None:
        """Waits for a step, with the next one in flight. Returns the seconds that the device took
        for it; None where the host came too late to see when it, or the one before it, ended."""
        was_ready = step.is_ready
        start = self._clock()
        step.wait()
        end = self._clock()
        self._spare.append(0.0 if was_ready else self._waited_s + end - start)
        self._waited_s = 0.0
        last_end_s, self._last_end_s = self._last_end_s, None if was_ready else end
        return None if was_ready or last_end_s is None else end - last_end_s

    def forget(self) -> None:
        """Forgets the last turns: nothing is in flight, and what comes may be of another kind."""
        self._spare.clear()
        self._waited_s = 0.0
        self._last_end_s = None

    @property
    def wait_s(self) -> float:
        """Seconds that a launch may wait after `wait_for_step`, a whole number of milliseconds."""
        if len(self._spare) < WINDOW:
            return 0.0
        return math.floor(min(SHARE * min(self._spare), MAX_WAIT_S) * 1000) / 1000

    def wait(self, for_message: Callable[[float], object]) -> None:
        """Calls `for_message` with `wait_s`, unless that is 0."""
        wait_s = self.wait_s
        if wait_s > 0:
            start = self._clock()
            for_message(wait_s)
            self._waited_s = self._clock() - start
