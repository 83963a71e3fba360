"""`python -m sglang.launch_server`: serves a model over HTTP until told to stop."""

from __future__ import annotations

from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.server_args import parse_cli


def main(argv: list[str] | None = None) -> int:
    """Runs a server; returns its exit code."""
    return run_server(parse_cli(argv))


if __name__ == "__main__":
    raise SystemExit(main())
