"""How long from safetensors in the page cache to a ready server, and what memory does it take?

Writes a checkpoint of random weights in a large geometry (16 GB by default) and starts servers from
it: one that warms the caches of files and compiled code, then some that count. Seconds are from
the start of the process until /health says 200. Host memory is the peak of the scheduler process:
VmHWM, which counts pages of mapped files too, and the most that was its own. The KV pool is
compared with what fits into the server's share of the GPU's memory beside the weights; CUDA
graphs lie outside of that share. --load-formats dummy does the same without files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from tqdm import tqdm

from benchmark.command import make_parser, store, write
from benchmark.environment import describe_environment
from benchmark.goals import GPU_OF_GOALS, LOAD_WEIGHTS_S, MIN_KV_SHARE
from benchmark.measure.long_prompts import CONTEXT_LEN, MAX_RUNNING
from benchmark.measure.startup import phases_of, stored_log
from benchmark.random_model import GEOMETRIES, random_model, write_weights
from benchmark.server_process import RunningServer, running_server
from sglang.srt.model_config import resolve_model_path
from sglang.srt.processes.runtime_config import GPU_STATIC_SHARE

SCHEDULER = "scheduler_process"  # in the command line of the process that loads the weights
SAMPLE_S = 0.02
ASK_MEMORY = "import torch; print(torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0)"


class PeakMemory:
    """The scheduler process's memory while the block runs, looked at by a thread.

    Attributes:
        peaks_kb: the most of each field of /proc/PID/status, and of the process's own pages.
    """

    def __init__(self) -> None:
        self.peaks_kb: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Looks no more."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        found = None
        while not self._is_over.wait(SAMPLE_S):
            # A process may end while it is looked at.
            with suppress(OSError, psutil.NoSuchProcess):
                found = found or _scheduler()
                if found is not None:
                    self.add(Path(f"/proc/{found.pid}/status").read_text())

    def add(self, status: str) -> None:
        """Takes in the content of /proc/PID/status."""
        sizes = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
        wanted = {name: sizes.get(name, 0) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
        wanted["own"] = wanted["RssAnon"] + wanted["RssShmem"]
        for name, size in wanted.items():
            self.peaks_kb[name] = max(size, self.peaks_kb.get(name, 0))


def _scheduler() -> psutil.Process | None:
    """The scheduler process of a server that this process started."""
    children = psutil.Process().children(recursive=True)
    return next((child for child in children if SCHEDULER in " ".join(child.cmdline())), None)


def kv_share(info: Mapping[str, Any], memory_bytes: int) -> dict[str, float]:
    """The KV pool beside what fits.

    Args:
        info: the answer of /server_info.
        memory_bytes: of the whole GPU.
    """
    found = info["resolved"]
    share = info["mem_fraction_static"] or GPU_STATIC_SHARE
    weights = found["num_parameters"] * torch.empty(0, dtype=_dtype(found["dtype"])).itemsize
    fitting = (share * memory_bytes - weights) / found["kv_bytes_per_token"]
    return {
        "static_share": share,
        "memory_bytes": memory_bytes,
        "weight_bytes": weights,
        "fitting_kv_tokens": int(fitting),
        "kv_share": round(found["max_total_num_tokens"] / fitting, 4),
    }


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def _server_info(server: RunningServer) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/server_info") as response:
        info: dict[str, Any] = json.load(response)
    return info


def start(command: list[str], limit_s: float) -> dict[str, Any]:
    """One start and end of a server."""
    with PeakMemory() as memory, running_server(command, {}, limit_s) as server:
        memory.stop()
        info = _server_info(server)
        server.stop()
    return {
        "ready_s": round(server.healthy_s, 3),
        "peak_mib": {name: size // 1024 for name, size in memory.peaks_kb.items()},
        "kv_tokens": info["max_total_num_tokens"],
        "kv_size_reason": info["resolved"]["kv_size_reason"],
        "info": {name: info[name] for name in ("mem_fraction_static", "resolved")},
        "phases": phases_of(line for _, line in server.log.lines),
        "log": stored_log(server.log),
    }


def summarize(runs: list[dict[str, Any]], memory_bytes: int | None) -> dict[str, Any]:
    """The median of the warm starts, and the last one's memory.

    Args:
        memory_bytes: of the GPU, if there is one.
    """
    last = runs[-1]
    return {
        "ready_s": round(statistics.median(run["ready_s"] for run in runs), 3),
        "peak_mib": {
            name: max(run["peak_mib"].get(name, 0) for run in runs) for name in last["peak_mib"]
        },
        "kv_tokens": last["kv_tokens"],
        "kv_size_reason": last["kv_size_reason"],
        **({} if memory_bytes is None else kv_share({**last["info"]}, memory_bytes)),
    }


def gpu_memory_bytes() -> int | None:
    """As the server sees it, asked in another process: a context here would take of it."""
    command = [sys.executable, "-c", ASK_MEMORY]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) or None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "load_weights")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--load-formats", nargs="+", choices=("auto", "dummy"), default=["auto", "dummy"])
    add("--warm-runs", type=int, default=2)
    add("--folder", type=Path, help="where the checkpoint is made; it is removed afterwards")
    add("--limit-s", type=float, default=300.0, help="of one start")
    add("--device", default="auto")
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints a table; the result is written after every load format."""
    arguments = parse()
    rows: list[dict[str, Any]] = []
    memory_bytes = None if arguments.device == "cpu" else gpu_memory_bytes()
    with random_model(arguments.geometry, CONTEXT_LEN, arguments.folder) as folder:
        num_bytes = write_weights(Path(folder), GEOMETRIES[arguments.geometry])
        result = {
            **describe_environment(),
            "geometry": arguments.geometry,
            "checkpoint_bytes": num_bytes,
            "goals_are_of": GPU_OF_GOALS,
            "asked": {"ready_s": LOAD_WEIGHTS_S, "kv_share": MIN_KV_SHARE},
            "rows": rows,
        }
        for load_format in arguments.load_formats:
            command = [
                *(sys.executable, "-m", "sglang.launch_server", "--model-path", folder),
                *("--tokenizer-path", str(resolve_model_path("demo"))),
                *("--load-format", load_format, "--device", arguments.device),
                *("--max-running-requests", str(MAX_RUNNING)),
            ]
            bar = tqdm(range(arguments.warm_runs + 1), desc=load_format, unit="start")
            runs = [start(command, arguments.limit_s) for _ in bar]
            found = summarize(runs[1:] or runs, memory_bytes)
            rows.append({"load_format": load_format, **found, "runs": runs})
            write(arguments.out, result)
    for row in rows:
        peak = row["peak_mib"]
        print(f"{row['load_format']:5} ready after {row['ready_s']:.1f} s", end=" ")
        print(f"(asked {LOAD_WEIGHTS_S:g} on {GPU_OF_GOALS}); host memory at most", end=" ")
        print(f"{peak['VmHWM']:,} MiB, own {peak['own']:,} MiB; KV pool", end=" ")
        print(f"{row['kv_tokens']:,} tokens, {row.get('kv_share', '-')} of what fits")
    store(arguments.out, result)


if __name__ == "__main__":
    main()
