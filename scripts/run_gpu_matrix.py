"""Do all ways to run on a GPU give the right tokens? The suites, once per way.

    python scripts/run_gpu_matrix.py --out benchmark/results/gpu_suites.json
    python scripts/run_gpu_matrix.py --ways triton "triton, no graphs" --paths test/e2e/test_mtp.py

Every way is a value of SGLANG_TEST_TARGET (`test/support/target.py`) for the same tests: those that
compare tokens with transformers, with a CPU or with each other, or check the KV ledger after every
step.
"kernels" are the tests that name what they run on themselves. Ways take the host's GPUs in turn.
FlashInfer has no float32 and no small heads, so it runs in float16 those over the bundled model.
Where it is not installed its ways are left out. Needs the packages of scripts/run_gpu_suite.sh.
Exit code 1 if a test fails or a run has none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark.command import store  # noqa: E402
from benchmark.environment import describe_environment  # noqa: E402
from sglang.srt.registry import ATTENTION_BACKENDS  # noqa: E402

DEMO_SUITES = (
    "test/e2e/test_greedy_equality.py",
    "test/e2e/test_mtp.py",
    "test/e2e/test_engine_determine_generation.py",
    "test/e2e/test_engine_pause_continue.py",
    "test/e2e/test_engine_flush_cache.py",
    "test/unit/mtp/test_mtp_equality.py",
)
SUITES = (
    *DEMO_SUITES,
    "test/e2e/test_logprobs_and_penalties.py",
    "test/unit/mtp/test_mtp_requests.py",
    "test/unit/mtp/test_pause_with_model.py",
    "test/unit/mtp/test_observability.py",
    "test/unit/mtp/test_ledger_matrix.py",
    "test/unit/mtp/test_packed_steps.py",
    "test/unit/speculative/test_second_model_drafter.py",
    "test/unit/speculative/test_toy_drafters.py",
)
KERNELS = "kernels"
KERNEL_SUITES = (
    "test/gpu",
    "sgl-kernel/tests/test_kernels_gpu.py",
    "sgl-kernel/tests/test_tree_kernels_gpu.py",
)
NO_OVERLAP = {"disable_overlap_schedule": True}
NO_GRAPHS = {"disable_cuda_graph": True}
TRITON = {"attention_backend": "triton"}
FLASHINFER = {"attention_backend": "flashinfer", "dtype": "float16"}
EACH_BACKEND = {name: {"attention_backend": name} for name in ATTENTION_BACKENDS.names}
WAYS: dict[str, dict[str, Any]] = EACH_BACKEND | {
    f"{backend}{more}": {**flags, **changes}
    for backend, flags in (("triton", TRITON), ("flashinfer", FLASHINFER))
    for more, changes in (
        ("", {}),
        (", no overlap", NO_OVERLAP),
        (", no graphs", NO_GRAPHS),
        (", no graphs, no overlap", {**NO_GRAPHS, **NO_OVERLAP}),
    )
}
WAYS[KERNELS] = {}


def suites_of(way: str) -> tuple[str, ...]:
    """What a way can run."""
    if way == KERNELS:
        return KERNEL_SUITES
    return DEMO_SUITES if way.startswith("flashinfer") else SUITES


def why_not(way: str) -> str | None:
    """Why a way cannot be gone on this host."""
    if way.startswith("flashinfer") and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return None


def run(
    way: dict[str, Any], paths: list[str], num_workers: int, limit_s: float, gpu: str
) -> dict[str, Any]:
    """Counts of one run of pytest, messages of tests that failed, near-ties that tests printed."""
    start = time.perf_counter()
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    if way:
        env["SGLANG_TEST_TARGET"] = json.dumps(way)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
        command += ["-n", str(num_workers), "--dist", "loadfile" if way else "load"]
        command += [f"--junitxml={report}"]
        command += ["-o", "junit_logging=system-out", "-o", "junit_log_passing_tests=true"]
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed_tests": {"pytest": f"not done after {limit_s:.0f} s"}, "tests": 0}
        found = counts(report)
    return {**found, "seconds": round(time.perf_counter() - start)}


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())] or [""]


def counts(report: Path) -> dict[str, Any]:
    """What a JUnit file of pytest says."""
    if not report.exists():
        return {"failed_tests": {"pytest": "did not run"}, "tests": 0}
    cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = ("failure", "error")
    bad = {
        f"{case.get('classname')}::{case.get('name')}": (problem.get("message") or "")[:500]
        for case in cases
        for kind in kinds
        if (problem := case.find(kind)) is not None
    }
    texts = [output.text or "" for case in cases for output in case.iter("system-out")]
    ties = [int(count) for text in texts for count in re.findall(r"(\d+) near-ties in", text)]
    seconds: Counter[str] = Counter()
    for case in cases:
        seconds[str(case.get("classname"))] += float(case.get("time") or 0.0)
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed_tests": bad,
        "near_ties": sum(ties),
        "seconds_by_file": {name: round(total) for name, total in seconds.most_common()},
    }


def is_good(found: dict[str, Any]) -> bool:
    """Whether something ran, and nothing failed."""
    return found["tests"] > found.get("skipped", 0) and not found["failed_tests"]


def main() -> int:
    """Runs all ways; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--paths", nargs="+", help="instead of the suites")
    parser.add_argument("--workers", type=int, default=8, help="of one way")
    parser.add_argument("--at-once", type=int, default=1, help="ways that run side by side")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one way")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    gpus = visible_gpus()
    ways = [name for name in arguments.ways if why_not(name) is None]
    for name in arguments.ways:
        if (reason := why_not(name)) is not None:
            print(f"{name:36} left out: {reason}", flush=True)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs = {}
        for index, name in enumerate(ways):
            paths = arguments.paths or list(suites_of(name))
            gpu = gpus[index % len(gpus)]
            future = pool.submit(run, WAYS[name], paths, arguments.workers, arguments.limit_s, gpu)
            runs[future] = name
        for future in tqdm(as_completed(runs), total=len(runs), desc="ways", disable=None):
            name, found = runs[future], future.result()
            results[name] = {"target": WAYS[name], **found}
            print(f"{name:36} {'ok' if is_good(found) else 'FAILED':7} {found}", flush=True)
            if arguments.out is not None:
                store(arguments.out, {**describe_environment(), "ways": results})
    return int(not results or not all(map(is_good, results.values())))


if __name__ == "__main__":
    sys.exit(main())
