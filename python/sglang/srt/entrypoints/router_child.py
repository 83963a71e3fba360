"""The router of several servers, from the package sglang-router: what it is told, and its main.

`python -m sglang.srt.entrypoints.router_child` is its process. It reads the settings from a line of
standard input, so that no key is in the list of processes, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from sglang.srt.argument_parsing import SuggestingParser
from sglang.srt.entrypoints.access import AccessRules
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.server_args import SERVE, ServerArgs

MODULE = "sglang.srt.entrypoints.router_child"
ADMIN = "admin"
DEATH_SIGNAL_OF_PARENT = 1  # of Linux: prctl(2)

# Settings that no flag of the router may have here.
REFUSED = {
    "pd_disaggregation": "the servers are those that --dp-size starts",
    "service_discovery": "the servers are those that --dp-size starts",
    "mini_lb": "it is for debugging only, and has no health checks",
    "server_cert_path": "put what speaks TLS in front of the router",
}


class RouterStart(msgspec.Struct):
    """Tells the router's process what to do.

    Attributes:
        parent: the id of the process that it must end with.
        settings: arguments of the package's `RouterArgs`.
    """

    parent: int
    settings: dict[str, Any]


def router_settings(
    args: ServerArgs, words: Sequence[str], urls: Sequence[str], metrics_port: int
) -> dict[str, Any]:
    """Gives the arguments of `RouterArgs`: flags with the prefix --router-, and what follows from
    those of the servers.

    Args:
        args: with the address that the router is to listen on.
        urls: of the servers.
        metrics_port: a free one, used unless the flags name another.

    Raises:
        LaunchError: if the package is not there, or a flag of it cannot be met.
        SystemExit: on a flag that the router does not have; the reason is printed.
    """
    try:
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        raise LaunchError(
            f"--dp-size needs a router ({error}): pip install 'sglang-router>=0.3.2', or start one"
            " server for each GPU (--base-gpu-id)."
        ) from None
    parser = SuggestingParser(prog=SERVE)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    parser.refuse_unknown([*words])
    try:
        parsed = RouterArgs.from_cli_args(parser.parse_args(words), use_router_prefix=True)
    except ValueError as error:
        raise LaunchError(f"A flag of the router: {error}.") from None
    settings = asdict(parsed)
    for name, reason in REFUSED.items():
        if settings.get(name):
            flag = f"--router-{name}".replace("server_", "tls-").replace("_", "-")
            raise LaunchError(f"{flag} cannot be with --dp-size: {reason}.")
    given = {word.partition("=")[0] for word in words}
    return settings | _own_settings(args, urls, metrics_port, given)


def _own_settings(
    args: ServerArgs, urls: Sequence[str], metrics_port: int, given: set[str]
) -> dict[str, Any]:
    """Gives what follows from the flags of the servers; flags of the router that are `given` win
    where there may be several values."""
    origins = sorted(AccessRules.of(args).allowed_origins) or [args.url()]  # none would be all
    wished: dict[str, dict[str, Any]] = {
        "--router-log-level": {"log_level": "debug" if args.log_level == "debug" else "warn"},
        "--router-prometheus-port": {"prometheus_port": metrics_port},
        "--router-prometheus-host": {"prometheus_host": args.host},
        "--router-cors-allowed-origins": {"cors_allowed_origins": origins},
        "--router-shutdown-grace-period-secs": {
            "shutdown_grace_period_secs": max(1, math.ceil(args.shutdown_timeout_s))
        },
    }
    settings = {"worker_urls": [*urls], "host": args.host, "port": args.port}
    for flag, values in wished.items():
        if flag not in given:
            settings |= values
    if args.api_key is not None:  # clients bring it, and the router brings it to the servers
        settings["api_key"] = args.api_key
    if args.admin_api_key is not None and "--router-control-plane-api-keys" not in given:
        settings["control_plane_api_keys"] = [(ADMIN, ADMIN, args.admin_api_key, ADMIN)]
    return settings


def main() -> None:
    """Routes until a signal comes, or the parent ends."""
    # The router keeps Python's lock while it runs, so no thread can watch standard input.
    ctypes.CDLL(None).prctl(DEATH_SIGNAL_OF_PARENT, signal.SIGKILL)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RouterStart)
    if os.getppid() != start.parent:
        return
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**start.settings))


if __name__ == "__main__":
    main()
