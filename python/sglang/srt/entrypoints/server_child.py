"""A server in a process of its own: its start, and its main.

`python -m sglang.srt.entrypoints.server_child` is that process: it reads its flags from a line of
standard input, so that no key is in the list of processes, and ends when that does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from urllib.error import URLError

import msgspec

from sglang.srt.entrypoints.children import NO_MORE, start_child
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.processes.flag_bounds import check_numbers
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import is_port_available

MODULE = "sglang.srt.entrypoints.server_child"
ASK_TIMEOUT_S = 10


def start_server(
    server_args: ServerArgs, environ: Mapping[str, str] = NO_MORE
) -> subprocess.Popen[bytes]:
    """Starts a server, and does not wait for it. It ends with this process.

    Args:
        environ: of `start_child`.

    Raises:
        ConfigError: for a number that its flag cannot be.
        LaunchError: if its port is in use.
    """
    check_numbers(server_args)
    if server_args.port == 0 or not is_port_available(server_args.port):
        raise LaunchError(
            f"Port {server_args.port} is in use, or 0, which is none; give another one."
        )
    return start_child(MODULE, asdict(server_args), environ)


def is_ready(server_args: ServerArgs) -> bool:
    """Asks the server with these flags whether it takes requests."""
    try:
        with direct_opener().open(f"{server_args.url()}/ready", timeout=ASK_TIMEOUT_S):
            return True
    except (URLError, OSError):
        return False


def direct_opener() -> urllib.request.OpenerDirector:
    """Makes what opens addresses of this machine, with no proxy between."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    """Serves until standard input ends or a signal comes; returns the exit code."""
    fields = msgspec.json.decode(sys.stdin.buffer.readline())

    def stop_with_parent() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not by sys.stdin, whose lock outlives threads
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, name="parent-watch", daemon=True).start()
    return run_server(msgspec.convert(fields, ServerArgs))


if __name__ == "__main__":
    sys.exit(main())
