"""Measures how long steps take on a GPU, by its own clock."""

from __future__ import annotations

from typing import Protocol

import torch


class StepTime(Protocol):
    """A step on the device's clock, from its first launch to its last one."""

    def end(self) -> None:
        """The step's launches have been made."""

    def took_ms(self) -> float | None:
        """Milliseconds, without the wait for the step before; None while the device has not done
        it. Waits for nothing."""


class StepClock(Protocol):
    """Times steps. Nothing waits for it."""

    def begin(self) -> StepTime:
        """A step's launches begin."""


class GpuStepTime:
    """A step on the current stream, which begins when this is made."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def end(self) -> None:
        self._end.record()

    def took_ms(self) -> float | None:
        return self._start.elapsed_time(self._end) if self._end.query() else None


class GpuStepClock:
    """A `StepClock` of the current stream."""

    def begin(self) -> StepTime:
        return GpuStepTime()
