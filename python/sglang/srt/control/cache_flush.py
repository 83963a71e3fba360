"""Flushes the prefix cache: at once or, within a time limit, as soon as no request holds KV."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.messages.control import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle


@dataclass(frozen=True, slots=True)
class _Waiting:
    call_id: int
    deadline: float


class CacheFlusher:
    """Handles flush_cache. Running requests block a flush, and so do waiting ones that may start.

    Args:
        reset_counters: starts the scheduler's counters anew.
        reply: sends a message to the front end.
        clock: seconds.
    """

    def __init__(
        self,
        state: EngineState,
        lifecycle: RequestLifecycle,
        between_steps: BetweenStepsQueue,
        reset_counters: Callable[[], None],
        reply: Callable[[Any], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._between_steps = between_steps
        self._reset_counters = reset_counters
        self._reply = reply
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self.handlers: dict[type, Callable[[Any], None]] = {FlushCacheReqInput: self._on_flush}

    @property
    def next_deadline(self) -> float:
        """Returns the time by the clock at which `tick` has something to do; infinity for never."""
        return min((call.deadline for call in self._waiting), default=math.inf)

    def tick(self) -> None:
        """Serves the calls that wait, and refuses those whose time is up."""
        if not self._waiting:
            return
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not self._serve(call.call_id, is_last_try=now >= call.deadline):
                self._waiting.append(call)

    def _on_flush(self, message: FlushCacheReqInput) -> None:
        call = _Waiting(message.call_id, self._clock() + message.timeout_s)

        def try_now() -> None:
            if not self._serve(call.call_id, is_last_try=message.timeout_s <= 0):
                self._waiting.append(call)

        self._between_steps.add(try_now)

    def _serve(self, call_id: int, is_last_try: bool) -> bool:
        """Tries to flush; tells whether the call has been answered."""
        problem = self._problem()
        if problem:
            if is_last_try:
                self._reply(FlushCacheReqOutput(call_id=call_id, success=False, error_msg=problem))
            return is_last_try
        flushed = self._lifecycle.ledger.flush()
        self._reset_counters()
        self._reply(FlushCacheReqOutput(call_id=call_id, success=True, flushed_items=flushed))
        return True

    def _problem(self) -> str:
        """Returns why the cache cannot be flushed now; empty if it can."""
        lifecycle, state = self._lifecycle, self._state
        if not lifecycle.holds_kv and (not lifecycle.waiting or not state.admits):
            return ""
        remedy = "wait for them or abort them"
        if state.pause_mode == "in_place":
            remedy = "they are paused in place and keep their KV; pause with mode retract instead"
        return (
            f"{len(lifecycle.running)} requests are running and {len(lifecycle.waiting)} waiting;"
            f" {remedy}."
        )
