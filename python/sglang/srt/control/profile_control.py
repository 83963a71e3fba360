"""Starts and stops profiles of the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.control.engine_state import BetweenStepsQueue
from sglang.srt.control.internal_state import SchedulerStats
from sglang.srt.messages.control import ControlReply, StartProfileReq, StopProfileReq

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    """See `step_profiler.StepProfiler`."""

    @property
    def is_running(self) -> bool: ...

    def start(
        self, output_dir: str, activities: list[str], with_stack: bool, record_shapes: bool
    ) -> None: ...

    def stop(self) -> str: ...


class ProfileControl:
    """Handles start_profile and stop_profile, between steps.

    Args:
        profiler: None where there is none.
        stats: counts the steps.
        reply: sends a message to the front end.
    """

    def __init__(
        self,
        profiler: Profiler | None,
        stats: SchedulerStats,
        between_steps: BetweenStepsQueue,
        reply: Callable[[Any], None],
    ) -> None:
        self._profiler = profiler
        self._stats = stats
        self._between_steps = between_steps
        self._reply = reply
        self._last_step: int | None = None
        self.handlers: dict[type, Callable[[Any], None]] = {
            StartProfileReq: lambda message: between_steps.add(lambda: self._start(message)),
            StopProfileReq: lambda message: between_steps.add(lambda: self._stop(message)),
        }

    def tick(self) -> None:
        """Ends a profile that has seen its steps, as soon as none is in flight."""
        if self._last_step is not None and self._stats.num_launched >= self._last_step:
            self._last_step = None
            self._between_steps.add(self._end)

    def _start(self, message: StartProfileReq) -> None:
        if self._profiler is None or self._profiler.is_running:
            missing = "There is no profiler."
            running = "A profile runs already; stop it first."
            self._answer(message.call_id, missing if self._profiler is None else running)
            return
        try:
            self._profiler.start(
                message.output_dir, message.activities, message.with_stack, message.record_shapes
            )
        except (ValueError, OSError, RuntimeError) as error:
            self._answer(message.call_id, str(error))
            return
        self._last_step = self._stats.num_launched + message.num_steps
        self._answer(message.call_id, "", f"Profiling {message.num_steps} steps at most.")

    def _stop(self, message: StopProfileReq) -> None:
        if self._profiler is None or not self._profiler.is_running:
            self._answer(message.call_id, "No profile runs; start one first.")
            return
        self._last_step = None
        try:
            path = self._profiler.stop()
        except (OSError, RuntimeError) as error:
            logger.exception("The profile cannot be written.")
            self._answer(message.call_id, f"The profile cannot be written: {error}")
            return
        self._answer(message.call_id, "", "The profile is written.", path=path)

    def _end(self) -> None:
        if self._profiler is None or not self._profiler.is_running:
            return
        try:
            logger.info("The profile is in %s.", self._profiler.stop())
        except (OSError, RuntimeError):
            logger.exception("The profile cannot be written.")

    def _answer(self, call_id: int, problem: str, text: str = "", **fields: Any) -> None:
        self._reply(
            ControlReply(
                call_id=call_id, success=not problem, message=problem or text, fields=fields
            )
        )
