"""`python -m sglang.launch_server`: serves a model over HTTP until told to stop."""

from __future__ import annotations

import signal
import sys

from sglang.srt.entrypoints.children import places_of, started_children
from sglang.srt.server_args import parse_cli


def main(argv: list[str] | None = None) -> int:
    """Runs a server; returns its exit code."""
    server_args = parse_cli(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until the server itself takes it
    try:
        # They import torch while this process imports the front end and looks at flags and model.
        with started_children(places_of(server_args)) as waiting:
            # Loaded only once there is something to start: --help comes at once.
            from sglang.srt.entrypoints.server_process import run_server

            return run_server(server_args, waiting)
    except KeyboardInterrupt:  # of a download, which the next start goes on with
        print("sglang: error: interrupted while starting.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
