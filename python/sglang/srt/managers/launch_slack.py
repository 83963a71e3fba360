"""How long the next launch may wait for messages while the device computes.

Of a closed loop of clients (agents, reinforcement learning) the next request comes within a few
milliseconds of the last answer. A step launched at once would leave its place empty for one step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

WINDOW = 8  # steps that are remembered
MAX_WAIT_S = 0.005  # who has not answered by then is not waited for


class LaunchSlack:
    """Watches a loop that launches each step before it reads the one before.

    The step in flight takes the device as long as the shortest of the last ones, at least; planning
    and launching the next one take the host about as long as they did lately, twice that to be
    safe. What is left can be waited. Where the host sets the pace, nothing is.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._launches: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._last_read: float | None = None

    def on_launch(self, start_s: float) -> None:
        """The next step is launched; its planning began at `start_s`."""
        self._launches.append(self._clock() - start_s)

    def on_read(self) -> None:
        """A step is read, and the next one in flight."""
        now = self._clock()
        if self._last_read is not None:
            self._steps.append(now - self._last_read)
        self._last_read = now

    def on_rest(self) -> None:
        """Nothing is in flight: what comes next may be of another kind."""
        self._steps.clear()
        self._last_read = None

    @property
    def wait_s(self) -> float:
        """Seconds, from the last read on."""
        if len(self._steps) < WINDOW:
            return 0.0
        slack = min(self._steps) - 2 * statistics.median(self._launches)
        return min(max(0.0, slack), MAX_WAIT_S)
