"""Times of steps on the device, seen by the host."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.step.worker import GenerationBatchResult


class StepTimes:
    """Times the steps of a loop that launches each one before it reads the one before.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_end_s: float | None = None

    def wait_for(self, step: GenerationBatchResult) -> float | None:
        """Waits for a step while the next one is in flight. Returns the seconds that the device
        took for it; None if the host came too late to see the end of this step or of the one
        before."""
        was_ready = step.is_ready
        step.wait()
        last_end_s, self._last_end_s = self._last_end_s, None if was_ready else self._clock()
        if self._last_end_s is None or last_end_s is None:
            return None
        return self._last_end_s - last_end_s

    def forget(self) -> None:
        """Forgets the end of the last step: with nothing in flight the next one begins later."""
        self._last_end_s = None
