"""Says when rounds of a number of drafts that is not the best are run, so that they are timed."""

from __future__ import annotations

from collections.abc import Sequence

# So many steps in a row are of one rival: too few for the drafter's model to rest.
TIMED_STEPS = 5
# Steps between two of these stretches, of any rivals; one rival waits so long for its second one,
# then WAIT_GROWTH times as long each time: what a round takes is soon known, and hardly changes.
LEAST_WAIT, MOST_WAIT, WAIT_GROWTH = 256, 4096, 4


class RivalTimes:
    """Chooses the rival that the next step has, if any. Batches of about as many requests, within a
    factor of 2, are looked at apart."""

    def __init__(self) -> None:
        self._due = dict[tuple[int, int], int]()  # by binary digits of requests, and rival
        self._waits = dict[tuple[int, int], int]()
        self._rival, self._begin = 0, -LEAST_WAIT  # of the last stretch

    def choose(self, step: int, num_reqs: int, rivals: Sequence[int]) -> int | None:
        """Gives the rival of step number `step`; steps ascend."""
        if step - self._begin < TIMED_STEPS:
            return self._rival if self._rival in rivals else None
        if step - self._begin < LEAST_WAIT:
            return None
        size = num_reqs.bit_length()
        rival = min(rivals, key=lambda each: self._due.get((size, each), 0), default=None)
        if rival is None or self._due.get((size, rival), 0) > step:
            return None
        wait = self._waits.get((size, rival), LEAST_WAIT)
        self._due[size, rival] = step + wait
        self._waits[size, rival] = min(wait * WAIT_GROWTH, MOST_WAIT)
        self._rival, self._begin = rival, step
        return rival
