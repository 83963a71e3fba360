"""Measures how long steps take on a GPU, by its own clock."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class StepClock(Protocol):
    """Times steps from their first launch to their last one. Nothing waits for it."""

    def begin(self) -> None:
        """A step's launches begin."""

    def end(self) -> None:
        """They have been made."""

    def ended(self) -> list[float]:
        """Milliseconds of the steps that the device has done since this was called last, in order.
        The wait for the step before is not counted, nor that for the host between two steps."""


class GpuStepClock:
    """A `StepClock` of the current stream."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._running = deque[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._start = self._event()

    def begin(self) -> None:
        self._start = self._event()
        self._start.record()

    def end(self) -> None:
        end = self._event()
        end.record()
        self._running.append((self._start, end))

    def ended(self) -> list[float]:
        found = []
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            found.append(start.elapsed_time(end))
            self._spare += (start, end)
        return found

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
