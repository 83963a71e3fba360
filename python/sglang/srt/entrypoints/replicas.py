"""`--dp-size`: several servers of one model and a router in front, from start to exit.

Each is a process; they share nothing. One that ends by itself ends them all, with exit code 1, so
that whoever supervises this command starts all of them again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.error import URLError

import msgspec

from sglang.srt.entrypoints.children import child_environ, start_child
from sglang.srt.entrypoints.replica_flags import ReplicaFlags
from sglang.srt.entrypoints.router_child import MODULE, RouterStart, router_settings
from sglang.srt.entrypoints.server_child import direct_opener, is_ready, start_server
from sglang.srt.entrypoints.server_process import (
    REFUSALS,
    BindError,
    LaunchError,
    check_start,
    listen,
    say,
)
from sglang.srt.host import Host
from sglang.srt.observability.log_format import RANK_VARIABLE
from sglang.srt.processes.child_process import configure_logging
from sglang.srt.processes.flag_checks import num_threads_of
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
ASK_TIMEOUT_S = 5
KILL_AFTER_S = 15.0  # beyond what running requests may use


def run_replicas(server_args: ServerArgs, flags: ReplicaFlags) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    0 after a signal; 1, with one line on standard error, if one of them cannot start or ends.
    """
    configure_logging(server_args.log_level, "launcher")
    try:
        plan = make_plan(server_args, flags)
    except (*REFUSALS, BindError) as error:
        say(str(error))
        return 1
    return Replicas(plan).run()


@dataclass(frozen=True)
class ReplicaPlan:
    """The processes to start.

    Attributes:
        url: the router's address, for this machine.
        servers: the flags of each.
        settings: see `router_settings`.
    """

    url: str
    servers: tuple[ServerArgs, ...]
    settings: dict[str, Any]


def make_plan(args: ServerArgs, flags: ReplicaFlags) -> ReplicaPlan:
    """Looks at all flags, finds model and ports, and divides the machine among the servers.

    Raises:
        ConfigError, ModelPathError, TokenizerError, LaunchError, BindError: one line for the user.
    """
    num_servers = flags.num_servers
    host = Host.probe()
    if args.device == "cpu" or (args.device == "auto" and "cuda" not in host.devices):
        num_threads = max(1, num_threads_of(args, host.num_cores) // num_servers)
        shares = [replace(args, device="cpu", num_threads=num_threads)] * num_servers
    else:  # a server that finds no GPU must not go on with the CPU
        first = range(args.base_gpu_id, args.base_gpu_id + num_servers * args.tp_size, args.tp_size)
        child_environ(first[-1] + args.tp_size - 1)  # which looks whether so many are visible
        shares = [replace(args, device="cuda", base_gpu_id=gpu_id) for gpu_id in first]
    folders, _ = check_start(shares[0])
    with listen(args.host, args.port) as listener:
        address, port = listener.getsockname()[:2]
        *ports, metrics_port = _free_ports(num_servers + 1)
    servers = [
        replace(share, host=LOOPBACK, port=each) for share, each in zip(shares, ports, strict=True)
    ]
    at = replace(args, host=address, port=port)
    urls = [each.url() for each in servers]
    settings = router_settings(at, flags.router_words, urls, metrics_port)
    folders.with_weights()  # before several would fetch the same
    return ReplicaPlan(at.url(), tuple(servers), settings)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


class Replicas:
    """The processes of a plan, from start to exit."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self._plan = plan
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()

    def run(self) -> int:
        """Serves until a signal comes; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            while not self._stop.wait(POLL_S):
                self._raise_if_ended()
            return 0
        except LaunchError as error:
            if self._stop.is_set():
                return 0
            say(str(error))
            return 1
        finally:
            self._end()

    def _start(self) -> None:
        plan = self._plan
        for number, args in enumerate(plan.servers):
            environ = {RANK_VARIABLE: str(number)}
            self._processes[f"server {number} ({args.url()})"] = start_server(args, environ)
        self._wait_until(lambda: all(map(is_ready, plan.servers)))
        start = RouterStart(os.getpid(), plan.settings)
        self._processes["router"] = start_child(MODULE, msgspec.to_builtins(start))
        self._wait_until(self._routes)
        logger.info(
            "Ready: %d servers are served at %s by a router (%s; metrics at port %s): %s",
            len(plan.servers),
            plan.url,
            plan.settings["policy"],
            plan.settings["prometheus_port"],
            " ".join(args.url() for args in plan.servers),
        )

    def _routes(self) -> bool:
        """Asks the router whether it has found all servers."""
        request = urllib.request.Request(f"{self._plan.url}/readiness")
        try:
            with direct_opener().open(request, timeout=ASK_TIMEOUT_S) as answer:
                found = msgspec.json.decode(answer.read())
        except (URLError, OSError, msgspec.DecodeError):
            return False
        return found["healthy_workers"] == len(self._plan.servers)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._raise_if_ended()
            if self._stop.wait(POLL_S):
                raise LaunchError("The start was interrupted.")

    def _raise_if_ended(self) -> None:
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise LaunchError(f"The {name} ended with {how}; all others stop.")

    def _on_signal(self, *_: object) -> None:
        """The first signal drains; the next ones go to the servers, which abort what runs."""
        if self._stop.is_set():
            self._terminate()
        self._stop.set()

    def _terminate(self) -> None:
        for process in self._processes.values():
            process.terminate()

    def _end(self) -> None:
        """Ends all, with the time for running requests that they have."""
        self._stop.set()
        self._terminate()
        patience_s = self._plan.servers[0].shutdown_timeout_s + KILL_AFTER_S
        deadline = time.monotonic() + patience_s
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("The %s did not stop in time and is killed.", name)
                process.kill()
                process.wait()
