"""Does what all child processes of a server do: reads the config, beats, ends with the parent."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn, Protocol

import msgspec

from sglang.srt.messages.ipc import ChildConfig, IpcAddresses
from sglang.srt.observability.log_format import make_handler
from sglang.srt.process_watch import BEAT_S

logger = logging.getLogger(__name__)

PARENT_GONE_S = 0.1  # by then it is known that a parent has ended whose pipe has


def configure_logging(level: str, role: str) -> None:
    """Logs to standard error, each line with the time, the process's role and the id of the
    request that it is about, if there is one."""
    handlers = [make_handler(sys.stderr, role)]
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)


def start_child_process() -> ChildConfig:
    """Reads the config from standard input and prepares the process to end with its parent.

    End of file on standard input ends the process, with exit code 0: its parent has closed it or
    is gone. Signals are left to the parent: service managers send SIGTERM to all processes of a
    service, and requests in the middle of their output need the children until they are drained.
    SIGHUP is what the system sends, and then lets it go on, to a stopped child of a dead parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not (line := sys.stdin.buffer.readline()):
        sys.exit()
    config = msgspec.json.decode(line, type=ChildConfig)
    threading.Thread(
        target=_exit_at_end_of_stdin,
        args=(config.addresses, os.getppid()),
        name="parent-watch",
        daemon=True,
    ).start()
    return config


class Turns(Protocol):
    """The turns of a process's main loop, as a `Receiver` counts them."""

    num_turns: int
    is_waiting: bool


class TurnLimit:
    """Finds out by regular beats that one turn of a main loop lasts too long: a step never ends.

    Time in which the process itself was stopped does not count, as it did not beat.

    Args:
        limit_s: for one turn; 0 for any time.
    """

    def __init__(self, turns: Turns, limit_s: float) -> None:
        self._turns = turns
        self._limit_s = limit_s
        self._last_turn = -1
        self._num_beats = 0

    def beat(self) -> bool:
        """Counts a beat; whether the present turn has lasted longer than it may."""
        turn = self._turns.num_turns
        if turn != self._last_turn or self._turns.is_waiting:
            self._last_turn, self._num_beats = turn, 0
        self._num_beats += 1
        return 0 < self._limit_s < self._num_beats * BEAT_S


def start_beats(child: ChildConfig, turns: Turns, limit_s: float) -> None:
    """Lets the parent know from now on that this process runs; ends it when a turn of its main loop
    lasts longer than `limit_s`, as SGLang's --watchdog-timeout does."""
    threading.Thread(
        target=_beat, args=(child.beats, TurnLimit(turns, limit_s)), name="beats", daemon=True
    ).start()


def _beat(beats: int | None, limit: TurnLimit) -> NoReturn:
    if beats is not None:
        os.set_blocking(beats, False)
    while not limit.beat():
        if beats is not None:
            with suppress(OSError):  # a parent that is stopped reads nothing, one that is gone too
                os.write(beats, b".")
        time.sleep(BEAT_S)
    logger.critical("A step lasts longer than --watchdog-timeout; all threads are here:")
    faulthandler.dump_traceback(sys.stderr)
    os._exit(1)


def _exit_at_end_of_stdin(addresses: IpcAddresses, parent: int) -> NoReturn:
    descriptor = sys.stdin.fileno()
    while os.read(descriptor, 4096):
        pass
    # A parent that lives removes the sockets itself, when no child needs them any more.
    deadline = time.monotonic() + PARENT_GONE_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.005)
    if os.getppid() != parent:
        addresses.remove()
    os._exit(0)
