"""Measures the time from `python -m sglang.launch_server` to the first answer of /generate.

Random weights in a large geometry, a greedy request of 16 tokens as soon as /health says 200. Cold:
every cache of compiled code (Triton, sgl_kernel, FlashInfer, inductor, the driver's) is an empty
folder. Warm: the same folders again. So cold less warm is the time of compiling and of measuring
prices of steps. --model-path serves weights of a folder instead, such as `benchmark.inflate`
writes. Files that the system has cached stay cached. The server is ended by SIGTERM, and all of its
processes must be gone.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from benchmark.goals import STARTUP_S
from benchmark.http_load import answer_once
from benchmark.random_model import GEOMETRIES, random_model
from benchmark.server_process import RunningServer, running_server
from sglang.srt.model_config import resolve_model_path

NUM_TOKENS = 16
FLAGS = "--max-running-requests 128 --context-length 4096"
DUMMY = ("--tokenizer-path", str(resolve_model_path("demo")), "--load-format", "dummy")
CACHES = {  # environment variable: folder
    "SGLANG_CACHE_DIR": "sglang",  # of Triton and sgl_kernel too
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
PHASES = {  # what a line of the log says of a phase's duration
    "graphs_s": r"Captured \d+ CUDA graphs .* in ([\d.]+) s",
    "detokenizer_ready_s": r"The detokenizer is ready after ([\d.]+) s",
    "scheduler_ready_s": r"The scheduler is ready after ([\d.]+) s",
    "server_ready_s": r"\bReady after ([\d.]+) s",
}


def phases_of(lines: Iterable[str]) -> dict[str, float]:
    """Durations that the log names; a phase that it does not name is left out."""
    found = {}
    for line in lines:
        for name, pattern in PHASES.items():
            if match := re.search(pattern, line):
                found[name] = float(match[1])
    return found


def starts(
    command: list[str], num_warm: int, limit_s: float, num_new: int
) -> Iterator[tuple[str, RunningServer, float]]:
    """Starts a server with empty caches of compiled code, then again and again with full ones. Each
    has given an answer of `num_new` tokens when it is yielded, and is ended afterwards.

    Yields:
        "cold" or "warm", the server, and the seconds from its start to the answer.

    Raises:
        StartError: a server failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: str(Path(folder) / place) for name, place in CACHES.items()}
        for path in environ.values():
            Path(path).mkdir()
        for run in tqdm(("cold", *["warm"] * num_warm), unit="start"):
            with running_server(command, environ, limit_s) as server:
                asyncio.run(asyncio.wait_for(answer_once(server.port, num_new), limit_s))
                yield run, server, time.perf_counter() - server.start_s
                if server.process.poll() is None:
                    server.stop()


def measure(command: list[str], num_warm: int, limit_s: float) -> list[dict[str, Any]]:
    """One cold start, then warm ones; seconds since the process was started."""
    return [
        {
            "run": run,
            "first_answer_s": round(answered_s, 3),
            "healthy_s": round(server.healthy_s, 3),
            "stop_s": round(server.stop(), 3),
            "phases": phases_of(line for _, line in server.log.lines),
        }
        for run, server, answered_s in starts(command, num_warm, limit_s, NUM_TOKENS)
    ]


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians, and what compiling costs."""
    cold, warm = (
        statistics.median(row["first_answer_s"] for row in rows if row["run"] == run)
        for run in ("cold", "warm")
    )
    return {"cold_s": cold, "warm_s": warm, "compile_s": round(cold - warm, 3)}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "startup")
    add = parser.add_argument
    add("--model-path", help="with weights; default: random ones in --geometry")
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--warm-runs", type=int, default=2, help="after the cold one, at least one")
    add("--limit-s", type=float, default=240.0, help="of one start")
    add("--server-flags", default=FLAGS, help=f'in place of "{FLAGS}"')
    arguments = parser.parse_args()
    with random_model(arguments.geometry) as folder:
        model = str(resolve_model_path(arguments.model_path or folder))
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *(DUMMY if arguments.model_path is None else ()),
            *arguments.server_flags.split(),
        ]
        rows = measure(command, arguments.warm_runs, arguments.limit_s)
    for row in rows:
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["phases"].items())
        print(f"{row['run']} {row['first_answer_s']:6.1f} s to the first answer ({phases})")
    result = {
        "model": arguments.model_path or f"random, {arguments.geometry}",
        "server_flags": arguments.server_flags,
        "asked": STARTUP_S,
        "summary": summarize(rows),
        "rows": rows,
    }
    print(f"{result['summary']}, asked: {STARTUP_S}")
    store(arguments.out, {**describe_environment(), **result})


if __name__ == "__main__":
    main()
