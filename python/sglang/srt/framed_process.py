"""Processes for work that no thread could be stopped at: each message is written after its length.

The parent has a `FramedProcess` and ends it when it takes too long; the child reads and writes with
`read` and `write`, and limits itself. A child ends when its parent does: it reads end of file.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from sglang.srt.process_watch import LOOK_S, is_stopped

OWN_ENDS = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
EXIT_SECONDS = 1.0
NUM_LENGTH_BYTES = 8
READ_BYTES = 1024 * 1024
LOW_PRIORITY = 10  # of `nice`: a tenth of a processor that others want, too
MIB = 1024 * 1024
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG")

T = TypeVar("T")


def write(stream: BinaryIO, message: bytes) -> None:
    """Writes a message after its length."""
    stream.write(len(message).to_bytes(NUM_LENGTH_BYTES, "little") + message)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream, or in the middle of a message."""
    head = stream.read(NUM_LENGTH_BYTES)
    if len(head) < NUM_LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    message = stream.read(length)
    return message if len(message) == length else None


def limit_memory(max_memory_mib: int, max_file_bytes: int = 0) -> None:
    """Limits the memory of this process, and the size of a file that it writes."""
    for kind, value in (
        (resource.RLIMIT_AS, max_memory_mib * MIB),
        (resource.RLIMIT_FSIZE, max_file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def resident_mib() -> float:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / MIB


def lower_priority() -> None:
    """Lets the threads of other processes, and others of this one, go before this thread."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(mine, LOW_PRIORITY))


def limit_time(seconds: int) -> None:
    """Lets the system end this process after so much more processor time."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))


class FramedProcess:
    """The parent's side of `python -m MODULE`. Neither call waits longer than it is told to."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environ(),
            # A Ctrl-C in the terminal is the server's alone. No session of its own: then the system
            # would not compare its priority with that of the other processes.
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_child = self._process.stdin.fileno()
        self._from_child = self._process.stdout.fileno()
        for descriptor in (self._to_child, self._from_child):
            os.set_blocking(descriptor, False)
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Tells whether somebody has stopped it (SIGSTOP), so that it will not answer."""
        return is_stopped(self.pid)

    def send(self, message: bytes) -> None:
        """Takes a message, and writes what the pipe has room for; `receive` writes the rest.

        Raises:
            EOFError: if the process has ended.
        """
        self._unsent += len(message).to_bytes(NUM_LENGTH_BYTES, "little") + message
        self._write()

    def receive(self, deadline: float) -> bytes | None:
        """The next message; None if there is none by then, in seconds of `time.monotonic`.

        Raises:
            EOFError: if the process has ended.
        """
        while (message := self._take()) is None:
            poll = select.poll()  # `select` knows the first 1024 descriptors only
            poll.register(self._from_child, select.POLLIN)
            if self._unsent:
                poll.register(self._to_child, select.POLLOUT)
            events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
                return None
            if self._to_child in events:
                self._write()
            if self._from_child in events:
                part = os.read(self._from_child, READ_BYTES)
                if not part:
                    raise EOFError
                self._received += part
        return message

    def ended_itself(self) -> bool:
        """Tells whether a process that has closed its pipes died of what it did: of a limit of the
        system, or a crash; not that somebody killed it."""
        try:
            return self._process.wait(EXIT_SECONDS) in OWN_ENDS
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        """Ends the process at once; a call that waits for it fails."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it and frees its pipes, once no call uses them."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _take(self) -> bytes | None:
        head = NUM_LENGTH_BYTES
        if len(self._received) < head:
            return None
        end = head + int.from_bytes(self._received[:head], "little")
        if len(self._received) < end:
            return None
        message = bytes(self._received[head:end])
        del self._received[:end]
        return message

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to_child, self._unsent[:READ_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise EOFError from None


class Endable(Protocol):
    """A process, or what stands for one."""

    @property
    def is_alive(self) -> bool:
        """Tells whether it can take another call."""

    @property
    def is_stopped(self) -> bool:
        """Tells whether it does nothing, for no fault of its call."""

    def end(self) -> None:
        """Ends it at once; a call that waits for it fails."""

    def close(self) -> None:
        """Ends it and frees what it holds."""


class _Stopped(Exception):
    """A process is stopped in the middle of a call."""


P = TypeVar("P", bound=Endable)


class ProcessPool(Generic[P]):
    """Some processes of a kind, each with one call at a time; one begins when a call needs it.

    Args:
        start: begins one.
        max_processes: that work at a time; other calls wait.
    """

    def __init__(self, start: Callable[[], P], max_processes: int) -> None:
        self._start = start
        self._idle: list[P] = []
        self._turns = asyncio.Semaphore(max_processes)

    async def call(self, work: Callable[[P], T], max_wait_s: float | None = None) -> T:
        """Returns what `work` gives, in a thread. A caller that is cancelled ends the process at
        work. If that is stopped, another one gets the work.

        Args:
            max_wait_s: for a process that is free; None for any time.

        Raises:
            TimeoutError: if none is by then.
        """
        async with asyncio.timeout(max_wait_s):
            await self._turns.acquire()
        try:
            while True:
                with suppress(_Stopped):
                    return await self._call(work)
        finally:
            self._turns.release()

    async def _call(self, work: Callable[[P], T]) -> T:
        """Returns what one process gives; raises _Stopped if it is stopped, and ended therefore."""
        process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = self._start()
        working = asyncio.create_task(asyncio.to_thread(work, process))
        try:
            while not (await asyncio.wait({working}, timeout=LOOK_S))[0]:
                if process.is_stopped:
                    raise _Stopped
            return working.result()
        except (asyncio.CancelledError, _Stopped):
            process.end()  # so the thread ends too
            await asyncio.gather(working, return_exceptions=True)
            raise
        finally:
            if process.is_alive:
                self._idle.append(process)
            else:
                process.close()

    def close(self) -> None:
        """Ends the processes that wait for a call."""
        while self._idle:
            self._idle.pop().close()


def bare_environ() -> dict[str, str]:
    """The environment of a process that finds this package as this one did, and nothing more."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
