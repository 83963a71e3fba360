"""A server started by a measurement: its port, its log, whether it is up, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import psutil

POLL_S = 0.02
STOP_LIMIT_S = 60.0


class StartError(RuntimeError):
    """The server did not start, answer or end as it should."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Tells whether nothing listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until_healthy(process: subprocess.Popen[str], port: int, deadline_s: float) -> None:
    """Returns when /health answers 200.

    Args:
        deadline_s: of `time.perf_counter`.

    Raises:
        StartError: if the server ends first, or it takes too long.
    """
    while not _is_healthy(port):
        if process.poll() is not None:
            raise StartError(f"The server ended with {process.returncode} while starting.")
        if time.perf_counter() > deadline_s:
            raise StartError("The server was not ready in time.")
        time.sleep(POLL_S)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class ServerLog:
    """The lines that a server writes, read by a thread."""

    def __init__(self, process: subprocess.Popen[str], file: TextIO | None) -> None:
        self._file = file
        self.lines: list[str] = []
        self._process = process
        self._thread = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if self._file is not None:
                print(line, end="", file=self._file, flush=True)

    def tail(self) -> str:
        """For a message."""
        return "\n".join(self.lines[-15:])


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        start_s: `time.perf_counter` when its process was started.
        healthy_s: from then until /health answered.
    """

    process: subprocess.Popen[str]
    port: int
    log: ServerLog
    start_s: float
    healthy_s: float

    def stop(self) -> None:
        """Ends the server and all of its processes.

        Raises:
            StartError: if they do not end, or not well.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise StartError(f"The server did not end within {STOP_LIMIT_S:g} s.") from None
        _, left = psutil.wait_procs(children, timeout=5)
        for child in left:
            child.kill()
        if code != 0 or left:
            raise StartError(f"The server ended with {code}; {len(left)} of its processes did not.")


@contextmanager
def running_server(
    command: list[str],
    environ: dict[str, str],
    limit_s: float,
    port: int | None = None,
    log_file: TextIO | None = None,
) -> Iterator[RunningServer]:
    """A server once it is healthy; whatever is left of it after the block is killed.

    Args:
        command: without --port.
        environ: added to this process's own.
        port: that it listens on; None: a free one.
        log_file: gets its log too.

    Raises:
        StartError: with the end of the server's log, also if the block raises one.
    """
    port = port or free_port()
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environ},
    )
    log = ServerLog(process, log_file)
    try:
        wait_until_healthy(process, port, start + limit_s)
        yield RunningServer(process, port, log, start, time.perf_counter() - start)
    except StartError as error:
        raise StartError(f"{error}\n{log.tail()}") from None
    finally:
        _kill_tree(process)


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """Whatever is left of a server after a failure."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
