"""The commands `sglang NAME ...` and `python -m sglang NAME ...`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from sglang import __version__


class Command(NamedTuple):
    """A module with a `main`, and what --help says of it."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("sglang.launch_server", "serve a model over HTTP"),
    "check-env": Command("sglang.check_env", "would a server start on this machine?"),
    "check-model": Command("sglang.check_model", "would a model's folder be served, and how?"),
    "convert-checkpoint": Command(
        "sglang.convert_checkpoint", "make safetensors of pickled weights"
    ),
    "bench-serving": Command("sglang.bench_serving", "load on a running server"),
    "bench-offline-throughput": Command("sglang.bench_offline_throughput", "the Engine's speed"),
    "bench-one-batch": Command("sglang.bench_one_batch", "one static batch, step by step"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 where there is no such command."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"sglang-adaptive {__version__}")
        return 0
    command = COMMANDS.get(name.replace("_", "-"))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f", did you mean {near[0]}?" if near else "."
        said = f"sglang: error: unknown command {name}{hint}\n\n" if name else ""
        print(f"{said}{usage()}", file=sys.stderr)
        return 2
    run: Callable[[list[str]], int] = import_module(command.module).main
    return run(rest)


def usage() -> str:
    """Writes what --help prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: sglang COMMAND [flags], or python -m sglang COMMAND [flags]",
            "",
            *lines,
            "",
            "sglang COMMAND --help lists its flags; sglang --version prints the version.",
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
