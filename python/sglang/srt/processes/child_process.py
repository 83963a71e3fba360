"""What every child process of a server does alike: read its config, notice its parent's end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from sglang.srt.messages.ipc import ChildConfig, IpcAddresses

logger = logging.getLogger(__name__)

PARENT_GONE_S = 0.1  # by then it is known that a parent has ended whose pipe has


def configure_logging(level: str, role: str) -> None:
    """Logs to standard error, each line with the time and the process's role."""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s {role}] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def start_child_process() -> ChildConfig:
    """Reads the config from standard input and prepares the process to end with its parent.

    End of file on standard input ends the process, with exit code 0: its parent has closed it or
    is gone. Signals are left to the parent: service managers send SIGTERM to all processes of a
    service, and requests in the middle of their output need the children until they are drained.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildConfig)
    threading.Thread(
        target=_exit_at_end_of_stdin,
        args=(config.addresses, os.getppid()),
        name="parent-watch",
        daemon=True,
    ).start()
    return config


def _exit_at_end_of_stdin(addresses: IpcAddresses, parent: int) -> NoReturn:
    descriptor = sys.stdin.fileno()
    while os.read(descriptor, 4096):
        pass
    # A parent that lives removes the sockets itself, when no child needs them any more.
    deadline = time.monotonic() + PARENT_GONE_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.005)
    if os.getppid() != parent:
        with suppress(OSError):  # another child may have done it
            _remove_sockets(addresses)
    os._exit(0)


def _remove_sockets(addresses: IpcAddresses) -> None:
    """Removes the sockets of a server and their directory."""
    paths = [Path(address.removeprefix("ipc://")) for address in msgspec.structs.astuple(addresses)]
    for path in paths:
        path.unlink(missing_ok=True)
    paths[0].parent.rmdir()
