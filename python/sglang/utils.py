"""Helpers of notebooks and launch scripts, by SGLang's names."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import urllib.request
from urllib.error import URLError

from sglang.srt.utils import get_open_port, kill_process_tree

POLL_S = 0.5


def execute_shell_command(command: str) -> subprocess.Popen[str]:
    """Starts a command, whose words are read as a shell reads them. There is no shell: no pipes."""
    words = shlex.split(command.replace("\\\n", " "))
    if words and words[0] in ("python", "python3"):
        words[0] = sys.executable
    return subprocess.Popen(words, text=True, stderr=subprocess.STDOUT)


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Starts a server's command with an address added; returns its process and port."""
    port = get_open_port() if port is None else port
    return execute_shell_command(f"{command} --host {shlex.quote(host)} --port {port}"), port


def wait_for_server(
    base_url: str, timeout: float | None = None, process: subprocess.Popen[str] | None = None
) -> None:
    """Waits until a server takes requests.

    Args:
        timeout: seconds; None for any time.
        process: the server's, if its end is to be noticed.

    Raises:
        TimeoutError: if it does not in time.
        RuntimeError: if its process has ended.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"The server ended with exit code {process.returncode}.")
        try:
            with opener.open(f"{base_url.rstrip('/')}/ready", timeout=10):
                return
        except (URLError, OSError):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"The server was not ready in {timeout:g} s.") from None
        time.sleep(POLL_S)


def terminate_process(process: subprocess.Popen[str]) -> None:
    """Kills a process and all that it has started."""
    kill_process_tree(process.pid)
    process.wait()


def print_highlight(text: object) -> None:
    """Prints a text so that it stands out."""
    print(f"\033[1;34m{text}\033[0m" if sys.stdout.isatty() else text)
