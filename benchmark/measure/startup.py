"""Measures the time from `python -m sglang.launch_server` to the first answer of /generate.

Random weights in a large geometry, CUDA graphs for up to --max-running-requests requests, a greedy
request of 16 tokens as soon as /health says 200. Cold: every cache of compiled code (Triton,
sgl_kernel, FlashInfer, inductor, the driver's) is an empty folder. Warm: the same folders again.
So cold less warm is the time of compiling and of measuring prices of steps. --model-path serves
weights of a folder instead, such as `benchmark.inflate` writes. With --eagle-head each server is
also started with such a head of random weights. Files that the system has cached stay cached. The
server is ended by SIGTERM, and all of its processes must be gone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from benchmark.goals import STARTUP_S
from benchmark.random_model import GEOMETRIES, random_head, random_model
from benchmark.server_process import ServerLog, StartError, running_server
from sglang.srt.model_config import resolve_model_path

NUM_TOKENS = 16
EAGLE = "EAGLE"
DUMMY = ("--tokenizer-path", str(resolve_model_path("demo")), "--load-format", "dummy")
DRAFT_PATH_FLAG = "--speculative-draft-model-path"
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
        _generate(server.port, limit_s)
        answered_s = time.perf_counter() - server.start_s
        stopped_s = server.stop()
    return {
        "first_answer_s": round(answered_s, 3),
        "healthy_s": round(server.healthy_s, 3),
        "stop_s": round(stopped_s, 3),
        "phases": phases_of(line for _, line in server.log.lines),
        "log": stored_log(server.log),
    }


def _generate(port: int, limit_s: float) -> None:
    """A greedy request, answered in full."""
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(range(3, 3 + NUM_TOKENS)), "sampling_params": params}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response:
            answer = json.load(response)
    except (urllib.error.URLError, OSError) as error:
        raise StartError(f"/generate failed: {error}") from None
    if len(answer["output_ids"]) != NUM_TOKENS:
        raise StartError(f"/generate gave {len(answer['output_ids'])} tokens, not {NUM_TOKENS}.")


def measure_backend(
    arguments: argparse.Namespace,
    model: str,
    backend: str | None,
    bar: tqdm[Any],
    head: str | None = None,
) -> list[dict[str, Any]]:
    """A cold start and warm ones, --cold-runs times.

    Args:
        head: folder of an EAGLE head; None for a server without a drafter.
    """
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
        *(DUMMY if arguments.model_path is None else ()),
        *("--max-running-requests", str(arguments.max_running_requests)),
        *("--context-length", str(arguments.context_length), "--device", arguments.device),
        *(("--attention-backend", backend) if backend else ()),
        *(("--speculative-algorithm", EAGLE, DRAFT_PATH_FLAG, head) if head else ()),
        *arguments.server_flags.split(),
    ]
    rows = []
    for _ in range(arguments.cold_runs):
        with tempfile.TemporaryDirectory() as folder:
            environ = {name: str(Path(folder) / place) for name, place in CACHES.items()}
            for path in environ.values():
                Path(path).mkdir()
            for run in ("cold", *["warm"] * arguments.warm_runs):
                row = {
                    "attention_backend": backend or "default",
                    "drafter": EAGLE if head else None,
                    "run": run,
                }
                bar.set_postfix_str(f"{label_of(row)}, {run}")
                try:
                    rows.append({**row, **time_start(command, environ, arguments.limit_s)})
                except StartError as error:  # the other backends can still be measured
                    rows.append({**row, "error": without_paths(str(error))})
                bar.update()
    return rows


def kind_of(row: dict[str, Any]) -> tuple[str, str | None]:
    """Backend and drafter of a server; old results have no drafter."""
    return row["attention_backend"], row.get("drafter")


def label_of(row: dict[str, Any]) -> str:
    """Returns `kind_of` a row as text to print."""
    backend, drafter = kind_of(row)
    return backend if drafter is None else f"{backend}, {drafter}"


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by backend and drafter, and what compiling costs."""
    summary = []
    for kind in dict.fromkeys(map(kind_of, rows)):
        medians = {}
        for run in STARTUP_S:
            times = [
                row["first_answer_s"]
                for row in rows
                if (kind_of(row), row["run"]) == (kind, run) and "error" not in row
            ]
            medians[run] = statistics.median(times) if times else None
        cold, warm = medians["cold"], medians["warm"]
        compile_s = None if cold is None or warm is None else round(cold - warm, 3)
        by_run = {f"{run}_s": value for run, value in medians.items()}
        summary.append(
            {"attention_backend": kind[0], "drafter": kind[1], **by_run, "compile_s": compile_s}
        )
    return summary


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "startup")
    add = parser.add_argument
    add("--model-path", help="with weights; default: random ones in --geometry")
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--attention-backends", nargs="*", default=[], help="default: the server's own choice")
    add("--max-running-requests", type=int, default=128)
    add("--context-length", type=int, default=4096)
    add("--cold-runs", type=int, default=1)
    add("--warm-runs", type=int, default=2, help="after each cold one")
    add("--limit-s", type=float, default=240.0, help="of one start")
    add("--eagle-head", action="store_true", help="also with a head that drafts")
    add("--server-flags", default="", help='more flags, such as "--disable-cuda-graph"')
    add("--device", default="auto")
    arguments = parser.parse_args(argv)
    if arguments.model_path is not None and arguments.eagle_head:
        parser.error("--eagle-head has random weights, and --model-path has not: choose one.")
    return arguments


def main() -> int:
    """Measures, prints a table, writes the result; 1 if a server failed."""
    arguments = parse()
    backends = arguments.attention_backends or [None]
    rows: list[dict[str, Any]] = []
    total = len(backends) * arguments.cold_runs * (1 + arguments.warm_runs)
    total *= 1 + arguments.eagle_head
    with (
        random_model(arguments.geometry) as folder,
        random_head(model := str(resolve_model_path(arguments.model_path or folder))) as head,
        tqdm(total=total, unit="start") as bar,
    ):
        for backend in backends:
            rows += measure_backend(arguments, model, backend, bar)
            if arguments.eagle_head:
                rows += measure_backend(arguments, model, backend, bar, head)
    result = {
        **describe_environment(),
        "model": arguments.model_path or f"random, {arguments.geometry}",
        "max_running_requests": arguments.max_running_requests,
        "context_length": arguments.context_length,
        "asked": STARTUP_S,
        "summary": summarize(rows),
        "rows": rows,
    }
    for row in (row for row in rows if "error" not in row):
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["phases"].items())
        label = f"{label_of(row):12} {row['run']:4}"
        print(f"{label} {row['first_answer_s']:6.1f} s to the first answer ({phases})")
    errors = [row for row in rows if "error" in row]
    for row in errors:
        print(f"{label_of(row):12} {row['run']:4} FAILED: {row['error']}")
    print(f"asked: {STARTUP_S}")
    store(arguments.out, result)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
