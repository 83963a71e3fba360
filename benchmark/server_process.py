"""A server started by a measurement: a port for it, and whether it is up."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request

POLL_S = 0.02


class StartError(RuntimeError):
    """The server did not start, answer or end as it should."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
