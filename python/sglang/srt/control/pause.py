"""Pauses and continues. docs/pause.md has the table of all transitions.

A pause stops launches at once. It takes effect, and is answered, when the step in flight has been
read. `drain` goes on launching, without new requests, until no request runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    ControlReply,
    LeaseEnd,
    PauseGenerationReq,
)
from sglang.srt.scheduling.request_lifecycle import LifecycleCounts, RequestLifecycle

logger = logging.getLogger(__name__)

PAUSE_ABORT_MESSAGE = "The request was aborted by a pause."
LEASE_ABORT_MESSAGE = "The request was aborted: the lease of a pause has run out."
CONFLICT = 409
COUNTS = ("running", "retracted", "aborted", "queued", "finished")


@dataclass(frozen=True, slots=True)
class _Lease:
    """The time limit of a pause, for the case that its owner is gone.

    Attributes:
        deadline: by the controller's clock, in seconds.
    """

    deadline: float
    duration_s: float
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class _Call:
    """A pause that has not been answered.

    Attributes:
        pause_number: number of the pause that it belongs to.
        before: the requests' counters when it was made.
    """

    message: PauseGenerationReq
    pause_number: int
    before: LifecycleCounts


class PauseController:
    """Handles pause and continue.

    Args:
        abort_all: ends all requests, with the message given.
        reply: sends a message to the front end.
        clock: seconds, for leases and drains.

    Attributes:
        pause_number: of the present pause, or of the last one; 0 before the first.
        num_lease_expiries: number of pauses ended by their lease.
    """

    def __init__(
        self,
        state: EngineState,
        lifecycle: RequestLifecycle,
        between_steps: BetweenStepsQueue,
        abort_all: Callable[[str], None],
        reply: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._between_steps = between_steps
        self._abort_all = abort_all
        self._reply = reply
        self._clock = clock
        self._lease: _Lease | None = None
        self._drains: list[_Call] = []
        self._drain_deadline = math.inf
        self.pause_number = 0
        self.num_lease_expiries = 0
        self.handlers: dict[type, Callable[[Any], None]] = {
            PauseGenerationReq: self._pause,
            ContinueGenerationReq: self._continue,
        }

    @property
    def next_deadline(self) -> float:
        """Returns the time by the clock at which `tick` has something to do; infinity for never."""
        lease = math.inf if self._lease is None else self._lease.deadline
        return min(lease, self._drain_deadline)

    def tick(self) -> None:
        """Ends drains that are done or out of time, and pauses whose lease has run out."""
        now = self._clock()
        if self._state.is_draining and (
            not self._lifecycle.awaits_finish or now >= self._drain_deadline
        ):
            self._stop_draining()
            self._between_steps.add(self._end_drains)
        if self._lease is not None and now >= self._lease.deadline:
            self._expire(self._lease)

    def _pause(self, message: PauseGenerationReq) -> None:
        if self._state.pause_mode is None:
            self.pause_number += 1
        self._state.pause_mode = message.mode
        self._lease = None
        call = _Call(message, self.pause_number, self._lifecycle.counts)
        if message.mode == "drain":
            timeout_s = message.drain_timeout_s
            self._drain_deadline = math.inf if timeout_s is None else self._clock() + timeout_s
            self._state.is_draining = True
            self._lifecycle.mark_to_finish(waiting_too=False)
            self._drains.append(call)
        else:
            self._stop_draining()
            if message.mode == "abort":
                self._abort_all(PAUSE_ABORT_MESSAGE)
            self._between_steps.add(lambda: self._settle(call))
        self._state.publish()

    def _settle(self, call: _Call) -> None:
        """Between steps, carries out the mode and answers."""
        is_in_force = self._state.pause_mode is not None and call.pause_number == self.pause_number
        if is_in_force and call.message.mode == "retract":
            self._lifecycle.retract_all()
        self._answer(call, "" if is_in_force else "Generation was continued before it had stopped.")
        if not self._state.is_draining:
            self._answer_drains()

    def _end_drains(self) -> None:
        """Ends drains, between steps, after all requests have finished or time is up, unless
        another call came first."""
        if self._drains and not self._state.is_draining:
            self._lifecycle.retract_all()
            self._answer_drains()

    def _answer_drains(self) -> None:
        refusal = ""
        if self._lifecycle.running:
            refusal = f"A later pause ({self._state.pause_mode}) has stopped the drain."
        drains, self._drains = self._drains, []
        for call in drains:
            self._answer(call, refusal)

    def _answer(self, call: _Call, refusal: str) -> None:
        """Answers a call. Its lease, if it has one, begins now."""
        seconds = call.message.lease_s
        if seconds is not None and not refusal:
            self._lease = _Lease(self._clock() + seconds, seconds, call.message.lease_end)
        self._state.publish()
        lifecycle, before = self._lifecycle, call.before
        counts = lifecycle.counts
        num_aborted = counts.num_aborted - before.num_aborted
        fields: dict[str, Any] = {
            "mode": call.message.mode,
            "epoch": call.pause_number,
            "running": len(lifecycle.running),
            "retracted": counts.num_retracted - before.num_retracted,
            "aborted": num_aborted,
            "queued": len(lifecycle.waiting),
            "finished": counts.num_ended - before.num_ended - num_aborted,
        }
        if not refusal:
            shown = ", ".join(f"{fields[name]} {name}" for name in COUNTS)
            logger.info(
                "Generation paused (%s, pause %d): %s.", fields["mode"], call.pause_number, shown
            )
        self._reply(
            ControlReply(
                call_id=call.message.call_id,
                success=not refusal,
                message=refusal or "Generation paused successfully.",
                status_code=CONFLICT,
                fields=fields,
            )
        )

    def _continue(self, message: ContinueGenerationReq) -> None:
        problem = self._state.unusable
        was_paused = self._state.pause_mode is not None
        if not problem:
            self._resume()
        fields = {
            "epoch": self.pause_number,
            "was_paused": was_paused,
            "running": len(self._lifecycle.running),
            "queued": len(self._lifecycle.waiting),
        }
        self._reply(
            ControlReply(
                call_id=message.call_id,
                success=not problem,
                message=problem or "Generation continued successfully.",
                fields=fields,
            )
        )

    def _resume(self) -> None:
        if self._state.pause_mode is not None:
            logger.info("Generation continues after pause %d.", self.pause_number)
        self._state.pause_mode = None
        self._lease = None
        self._stop_draining()
        drains, self._drains = self._drains, []
        for call in drains:
            self._answer(call, "Generation was continued before it had stopped.")
        self._state.publish()

    def _stop_draining(self) -> None:
        self._state.is_draining = False
        self._drain_deadline = math.inf
        if not self._state.awaits_end:
            self._lifecycle.unmark_to_finish()

    def _expire(self, lease: _Lease) -> None:
        logger.warning(
            "The lease of pause %d (%s, %g s) has run out: %s.",
            self.pause_number,
            self._state.pause_mode,
            lease.duration_s,
            "requests go on" if lease.end == "continue" else "all requests are aborted",
        )
        self.num_lease_expiries += 1
        if lease.end == "abort":
            self._abort_all(LEASE_ABORT_MESSAGE)
        self._resume()
