"""Helpers of launch scripts, by SGLang's names: processes, ports, limits; no torch on import."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang.srt.utils.tensor_serializer import (
    MultiprocessingSerializer as MultiprocessingSerializer,
)


class ServerStatus(Enum):
    """Names what a launcher may say of its server."""

    Up = "Up"
    Starting = "Starting"
    UnHealthy = "UnHealthy"


def kill_process_tree(
    parent_pid: int | None = None, include_parent: bool = True, skip_pid: int | None = None
) -> None:
    """Kills the processes that a process has started, and those that they have; then itself.

    Args:
        parent_pid: None: this process, which stays.
        include_parent: whether to kill `parent_pid` too; this process then exits with 0.
        skip_pid: a child that is left alone, with its own children.
    """
    if parent_pid is None:
        parent_pid, include_parent = os.getpid(), False
    for pid in _descendants(parent_pid, skip_pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not include_parent:
        return
    if parent_pid == os.getpid():
        sys.exit(0)
    with suppress(ProcessLookupError):
        os.kill(parent_pid, signal.SIGKILL)


def _descendants(parent_pid: int, skip_pid: int | None) -> list[int]:
    """Processes that a process has started, and those that they have, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The name, in parentheses, may hold anything; the parent is two fields after it.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid for pid in children.get(parent_pid, []) if pid != skip_pid]
    for pid in found:
        found += (child for child in children.get(pid, []) if child != skip_pid)
    return found


def is_port_available(port: int) -> bool:
    """Tells whether a server may listen on a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except (OSError, OverflowError):
            return False
        return True


def get_open_port() -> int:
    """A port without a listener: SGLANG_PORT, or the next that is free; else any."""
    wished = os.environ.get("SGLANG_PORT", "")
    if wished.isdigit():
        for port in range(int(wished), 65_536):
            if is_port_available(port):
                return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def get_ip() -> str:
    """The address that other machines reach this one by: SGLANG_HOST_IP, HOST_IP, or that of the
    way out of the network. Nothing is sent."""
    if address := os.environ.get("SGLANG_HOST_IP") or os.environ.get("HOST_IP"):
        return address
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 80))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def set_ulimit(target_soft_limit: int = 65_535) -> None:
    """Lets this process open that many files, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wished:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))


def is_cuda() -> bool:
    """Tells whether there is an NVIDIA GPU that works."""
    from sglang.srt.platform import Platform

    return Platform.probe().device == "cuda"


def set_prometheus_multiproc_dir() -> None:
    """Does nothing: `/metrics` is answered from the scheduler's state, without files."""


def add_prometheus_middleware(app: Any) -> None:
    """Does nothing: `/metrics` is a route like the others."""


def suppress_noisy_warnings() -> None:
    """Does nothing: there are none."""


def assert_pkg_version(pkg: str, min_version: str, message: str) -> None:
    """
    Raises:
        RuntimeError: with `message`, if a package is missing or older.
    """
    try:
        installed = metadata.version(pkg)
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"{pkg} {min_version} or later is missing. {message}") from None
    if _numbers(installed) < _numbers(min_version):
        raise RuntimeError(f"{pkg} is {installed}, older than {min_version}. {message}")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.11.0+cpu` as (2, 11, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
