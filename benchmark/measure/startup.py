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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from benchmark.goals import STARTUP_S
from benchmark.http_load import answer_once
from benchmark.random_model import GEOMETRIES, random_head, random_model
from benchmark.server_process import ServerLog, running_server
from sglang.srt.model_config import resolve_model_path

NUM_TOKENS = 16
FLAGS = "--max-running-requests 128 --context-length 4096"
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path")
DUMMY = ("--tokenizer-path", str(resolve_model_path("demo")), "--load-format", "dummy")
MAX_LOG_LINES = 200
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


def without_paths(line: str) -> str:
    """A line of a log for a stored result: of the machine's paths only the last name."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":,)]+/)+", ".../", line)


def stored_log(log: ServerLog) -> list[str]:
    """The first lines of a log, for a stored result."""
    return [f"{at:.3f} s: {without_paths(line)}" for at, line in log.lines[:MAX_LOG_LINES]]


def time_start(command: list[str], environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """One start, one answer, one end; seconds since the process was started.

    Raises:
        StartError: with the end of the server's log.
    """
    with running_server(command, environ, limit_s) as server:
        asyncio.run(asyncio.wait_for(answer_once(server.port, NUM_TOKENS), limit_s))
        answered_s = time.perf_counter() - server.start_s
        stopped_s = server.stop()
    return {
        "first_answer_s": round(answered_s, 3),
        "healthy_s": round(server.healthy_s, 3),
        "stop_s": round(stopped_s, 3),
        "phases": phases_of(line for _, line in server.log.lines),
        "log": stored_log(server.log),
    }


def measure(command: list[str], num_warm: int, limit_s: float) -> list[dict[str, Any]]:
    """One cold start, then warm ones.

    Raises:
        StartError: a server failed.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: str(Path(folder) / place) for name, place in CACHES.items()}
        for path in environ.values():
            Path(path).mkdir()
        for run in tqdm(("cold", *["warm"] * num_warm), unit="start"):
            rows.append({"run": run, **time_start(command, environ, limit_s)})
    return rows


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
    add("--eagle-head", action="store_true", help="with a head of random weights that drafts")
    add("--server-flags", default=FLAGS, help=f'in place of "{FLAGS}"')
    arguments = parser.parse_args()
    with (
        random_model(arguments.geometry) as folder,
        random_head(model := str(resolve_model_path(arguments.model_path or folder))) as head,
    ):
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *(DUMMY if arguments.model_path is None else ()),
            *((*EAGLE, head) if arguments.eagle_head else ()),
            *arguments.server_flags.split(),
        ]
        rows = measure(command, arguments.warm_runs, arguments.limit_s)
    for row in rows:
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["phases"].items())
        print(f"{row['run']} {row['first_answer_s']:6.1f} s to the first answer ({phases})")
    result = {
        "model": arguments.model_path or f"random, {arguments.geometry}",
        "has_head": arguments.eagle_head,
        "server_flags": arguments.server_flags,
        "asked": STARTUP_S,
        "summary": summarize(rows),
        "rows": rows,
    }
    print(f"{result['summary']}, asked: {STARTUP_S}")
    store(arguments.out, {**describe_environment(), **result})


if __name__ == "__main__":
    main()
