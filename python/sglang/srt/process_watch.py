"""Finds out whether processes run: by what the system says, and by a thread of theirs that beats.

A process that beats writes a byte to a pipe every `BEAT_S`, from a thread that waits for nothing
else. It is stopped if the system says so (SIGSTOP, a debugger), or if it has not beaten for
`SILENT_S` and used no processor meanwhile. So a long step, a load or a compilation is no stop: the
thread beats on, or, where one call keeps all threads waiting, that call uses a processor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

BEAT_S = 0.25
LOOK_S = 0.25  # between two looks at a process
SILENT_S = 5.0
IDLE_SHARE = 0.1  # of a processor; a silent process that uses more works
LONGEST_LOOK_S = 1.0  # counted between two looks: whoever looks may have been stopped too
RUNNING, STOPPED = "R", "Tt"  # states of Linux; t: by a debugger
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PIPE_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """Holds what the system says of a process.

    Attributes:
        state: one letter, of its main thread.
        cpu_s: seconds of a processor that all its threads have used.
    """

    state: str
    cpu_s: float


def look_at(pid: int) -> ProcessLook | None:
    """The look of a process; None if it is gone, or the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may have spaces
    except OSError:
        return None
    return ProcessLook(fields[0].decode(), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def is_stopped(pid: int) -> bool:
    """Tells whether the system says that the process is stopped."""
    look = look_at(pid)
    return look is not None and look.state in STOPPED


@dataclass(frozen=True, slots=True)
class Stop:
    """A process that is stopped now.

    Attributes:
        message: for clients.
    """

    role: str
    message: str


@dataclass
class _Process:
    """Holds what is known of one process.

    Attributes:
        beats: the reading end of its pipe.
        silent_s: since its last beat; None before the first one.
        cpu_s: what it had used by then.
        stopped_s: for how long it has been stopped; 0 while it runs.
    """

    role: str
    pid: int
    beats: int
    looked_at_s: float
    silent_s: float | None = None
    cpu_s: float = 0.0
    stopped_s: float = 0.0
    stop: Stop | None = None


class ProcessWatch:
    """Looks at processes whenever it is asked about them, in any thread.

    Args:
        limit_s: how long one may be stopped, or silent whatever it does; 0 for any time.
        look: what the system says of a process id.
        clock: seconds.
    """

    def __init__(
        self,
        limit_s: float = 0.0,
        look: Callable[[int], ProcessLook | None] = look_at,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._look = look
        self._clock = clock
        self._processes: dict[str, _Process] = {}
        self._lock = threading.Lock()

    def add(self, role: str, pid: int, beats: int) -> None:
        """Watches a process; `beats` is the reading end of its pipe, closed by `close`."""
        os.set_blocking(beats, False)
        with self._lock:
            self._processes[role] = _Process(role, pid, beats, self._clock())

    def stopped(self, *roles: str) -> Stop | None:
        """The first of these processes, or of all, that is stopped now."""
        with self._lock:
            for process in self._chosen(roles):
                self._update(process)
                if process.stop is not None:
                    return process.stop
        return None

    def stopped_for(self, seconds: float, *roles: str) -> str | None:
        """Names the first of these processes that has been stopped for so long."""
        with self._lock:
            for process in self._chosen(roles):
                self._update(process)
                if process.stop is not None and process.stopped_s >= seconds:
                    return f"The {process.role} process has been stopped"
        return None

    def all_beat(self, *roles: str) -> bool:
        """Tells whether each of these processes has begun to beat, and none is stopped now."""
        if self.stopped(*roles) is not None:
            return False
        with self._lock:
            return sum(each.silent_s is not None for each in self._chosen(roles)) == len(roles)

    def overdue(self) -> str | None:
        """Why a process must be given up; None if none must be."""
        with self._lock:
            for process in self._chosen(()):
                self._update(process)
                if 0 < self._limit_s < max(process.stopped_s, process.silent_s or 0.0):
                    return (
                        f"The {process.role} process has been stopped or silent for more than"
                        f" {self._limit_s:g} s (--watchdog-timeout)"
                    )
        return None

    def close(self) -> None:
        """Forgets all processes."""
        with self._lock:
            for process in self._processes.values():
                os.close(process.beats)
            self._processes.clear()

    def _chosen(self, roles: tuple[str, ...]) -> list[_Process]:
        return [each for role, each in self._processes.items() if not roles or role in roles]

    def _update(self, process: _Process) -> None:
        now_s = self._clock()
        passed_s = min(now_s - process.looked_at_s, LONGEST_LOOK_S)
        process.looked_at_s = now_s
        look = self._look(process.pid)
        if _has_beaten(process.beats):
            process.silent_s = 0.0
            process.cpu_s = 0.0 if look is None else look.cpu_s
        elif process.silent_s is not None:
            process.silent_s += passed_s
        message = _reason(process, look)
        if message is None:
            if process.stop is not None:
                logger.info("The %s process goes on.", process.role)
            process.stop, process.stopped_s = None, 0.0
            return
        if process.stop is None:
            logger.warning("%s", message)
        else:
            process.stopped_s += passed_s
        process.stop = Stop(process.role, message)


def _reason(process: _Process, look: ProcessLook | None) -> str | None:
    """Why the process counts as stopped; None if it does not."""
    if look is None:
        return None
    if look.state in STOPPED:
        return f"The {process.role} process is stopped; it answers again when it goes on."
    silent_s = process.silent_s or 0.0
    is_idle = look.state != RUNNING and look.cpu_s - process.cpu_s < IDLE_SHARE * silent_s
    if silent_s > SILENT_S and is_idle:
        return f"The {process.role} process has given no sign of life for {silent_s:.0f} s."
    return None


def _has_beaten(beats: int) -> bool:
    """Tells whether a beat has come since the last call; takes all that have."""
    with suppress(BlockingIOError):
        return bool(os.read(beats, PIPE_BYTES))
    return False
