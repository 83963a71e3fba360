"""Keeps the reasons why the engine does not run, and the work that must wait for the step in
flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sglang.srt.messages.control import EngineStatus, PauseMode
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle


class EngineState:
    """The reasons that keep the scheduler from launching steps.

    Args:
        send: gets the status for the front end whenever it has changed.

    Attributes:
        pause_mode: mode of the present pause; None without one.
        is_draining: the pause still lets running requests finish.
        released: tags of the memory that is given back.
        broken: why the weights must not be used; empty if they may.
        awaits_end: a weight update waits for running requests to finish, and no new one may start.
        in_weight_session: whether a weight update has begun and not ended.
    """

    def __init__(self, lifecycle: RequestLifecycle, send: Callable[[EngineStatus], None]) -> None:
        self._lifecycle = lifecycle
        self._send = send
        self._published = EngineStatus(weight_version=lifecycle.weight_version)
        self.pause_mode: PauseMode | None = None
        self.is_draining = False
        self.released: set[str] = set()
        self.broken = ""
        self.awaits_end = False
        self.in_weight_session = False

    @property
    def may_launch(self) -> bool:
        is_paused = self.pause_mode is not None and not self.is_draining
        return not (is_paused or self.unusable)

    @property
    def admits(self) -> bool:
        """Tells whether every waiting request may start. If not, only those may for which a drain
        or a weight update waits (`Req.must_finish`)."""
        return not self.stopped

    @property
    def unusable(self) -> str:
        """The reason why no step could run even without a pause; empty if one could."""
        if self.released:
            tags = ", ".join(sorted(self.released))
            return f"Memory is released ({tags}); call resume_memory_occupation."
        return self.broken

    @property
    def stopped(self) -> str:
        """The reason why new requests do not start now; empty while they do."""
        if self.pause_mode is not None:
            return f"Generation is paused ({self.pause_mode})."
        if self.awaits_end:
            return "A weight update waits for running requests."
        return self.unusable

    def publish(self) -> None:
        """Sends the status to the front end if it has changed."""
        status = EngineStatus(
            stopped=self.stopped,
            is_frozen=not self.may_launch,
            weight_version=self._lifecycle.weight_version,
            in_weight_session=self.in_weight_session,
        )
        if status != self._published:
            self._published = status
            self._send(status)


class BetweenStepsQueue:
    """Work that waits until every launched step has been read, so that none is in flight.

    While work waits no step is launched, so it waits for one step at most. It runs in the order of
    arrival, so calls take effect in the order in which they were made.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._work)

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def run(self) -> None:
        """Does all work. Call it only with no step in flight."""
        while self._work:
            self._work.popleft()()
