"""`python -m sglang.launch_server`: serves a model over HTTP until told to stop."""

from __future__ import annotations

import signal
import sys

from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.server_args import parse_cli


def main(argv: list[str] | None = None) -> int:
    """Runs a server; returns its exit code."""
    try:
        return run_server(parse_cli(argv))
    except KeyboardInterrupt:  # of a download, which the next start goes on with
        print("sglang: error: interrupted while starting.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
