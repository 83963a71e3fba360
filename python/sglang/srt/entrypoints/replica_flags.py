"""Flags of `sglang serve` alone: how many servers there are, and what their router is told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.argument_parsing import parse_flags
from sglang.srt.server_args import ServerArgs, server_parser

NAMES = ("--dp-size", "--dp", "--data-parallel-size")
ROUTER = "--router-"
MOST = 64


@dataclass(frozen=True)
class ReplicaFlags:
    """The servers of one command.

    Attributes:
        num_servers: 1: no router.
        router_words: the flags of the router, with their prefix.
    """

    num_servers: int = 1
    router_words: tuple[str, ...] = ()


def parse_serve(argv: Sequence[str]) -> tuple[ServerArgs, ReplicaFlags]:
    """Parses a command line of `sglang serve`.

    Raises:
        SystemExit: see `parse_cli`; flags of the router are read later, by its own package.
    """
    words, router_words = _split(argv)
    parser = server_parser()
    group = parser.add_argument_group(
        "Several servers",
        "Flags of the router begin with --router-, such as --router-policy round_robin:"
        " `python -m sglang_router.launch_router --help` has them, without that prefix.",
    )
    group.add_argument(
        *NAMES,
        dest="num_servers",
        type=_number_of_servers,
        default=1,
        metavar="DP_SIZE",
        help="Servers of the whole model, each with --tp-size GPUs or a share of a CPU's cores,"
        " behind the router of the package sglang-router, which listens on --host and --port"
        " (default: 1, without a router)",
    )
    parser.refuse_unknown(words)
    namespace, own = parse_flags(parser, words, ServerArgs)
    if router_words and namespace.num_servers == 1:
        parser.error(f"{router_words[0]} is for the router of --dp-size 2 and more")
    return ServerArgs(**own), ReplicaFlags(namespace.num_servers, tuple(router_words))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes the flags of the router, with the words behind each, out of a command line."""
    own: list[str] = []
    router: list[str] = []
    to = own
    for word in argv:
        if word.startswith("-"):
            to = router if word.startswith(ROUTER) else own
        to.append(word)
    return own, router


def _number_of_servers(text: str) -> int:
    if text.isdecimal() and 1 <= (number := int(text)) <= MOST:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MOST}")
