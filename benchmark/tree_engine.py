"""Serves an Engine of the tree of sources that PYTHONPATH names first, to a process that measures.

It reads JSON from standard input, a line each, and answers on standard output: first what to serve,
then runs (`benchmark/measure/trees.py`). It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys

from benchmark.mtp_model import start_engine
from benchmark.paired import Way, closed_loops


def main() -> None:
    """Starts the Engine, then answers each line with the figures of a run."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an Engine prints is no answer

    def answer(fields: dict[str, object]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    served = json.loads(sys.stdin.readline())
    engine = start_engine(served["flags"], **served["more"])
    try:
        ways = {name: Way(engine, params) for name, params in served["ways"].items()}
        run = closed_loops(ways, served["prompts"])
        answer({})
        for line in sys.stdin:
            answer(dict(run(*json.loads(line))))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
