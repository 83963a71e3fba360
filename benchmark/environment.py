"""Describes where a benchmark result was measured: machine, commit, versions, command.

The commit is read, never typed. In a checkout git knows it. A tree that is copied to another host
brings it along: `git archive` writes it into benchmark/commit.txt, and who copies a checkout in
another way has its script set SGLANG_BENCHMARK_COMMIT to the output of

    git describe --always --abbrev=40 --exclude='*' --dirty
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import sglang

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "numpy")
GPU_FIELDS = "name,driver_version,memory.total"
COMMIT_VARIABLE, DIRTY = "SGLANG_BENCHMARK_COMMIT", "-dirty"
NO_CHANGE = (":!benchmark/results", ":!README.md", ":!docs")  # they follow from results


def describe_environment() -> dict[str, Any]:
    """The fields that every file in benchmark/results/ begins with."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30),
            "system": f"{platform.system()} {platform.machine()}",
            **_gpus(),
        },
        **measured_commit(),
        "command": shown_command(sys.argv),
        **_switches(os.environ),
        "versions": {
            "python": platform.python_version(),
            "sglang-adaptive": sglang.__version__,
            **_package_versions(),
            **_cuda_version(),
        },
    }


def measured_commit(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Gives the commit of the tree under `root`, and whether files differ from it."""
    stamp = (root / "benchmark" / "commit.txt").read_text(encoding="utf-8").strip()
    if not stamp.startswith("$"):
        return {"commit": stamp, "dirty": False}
    if _git(root, "rev-parse", "--show-toplevel") == str(root):
        changes = _git(root, "status", "--porcelain", "--", *NO_CHANGE)
        return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": bool(changes)}
    told = environ.get(COMMIT_VARIABLE, "")
    return {"commit": told.removesuffix(DIRTY) or "unknown", "dirty": told.endswith(DIRTY)}


def _switches(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the server's switches in the environment, but no paths."""
    names = sorted(name for name in environ if name.startswith("SGLANG_"))
    found = {name: environ[name] for name in names if name != COMMIT_VARIABLE}
    shown = {name: value for name, value in found.items() if "/" not in value}
    return {"environment": shown} if shown else {}


def _package_versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed: a CPU needs no Triton."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cuda_version() -> dict[str, str]:
    """The CUDA that torch was built for; nothing where torch is for CPUs only."""
    import torch

    return {"cuda": torch.version.cuda} if torch.version.cuda else {}


def _gpus() -> dict[str, Any]:
    """GPU, how many, memory and driver, asked of the driver: torch would set up a context."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        return {}
    name, driver, memory_mib = (field.strip() for field in lines[0].split(","))
    gpu = {"gpu": name, "gpus": len(lines), "driver": driver}
    return {**gpu, "gpu_memory_gb": round(float(memory_mib) / 1024)}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def shown_command(argv: Sequence[str]) -> str:
    """Gives a command as others can run it: of a path of this machine only the last name."""
    script, words = Path(argv[0]).resolve(), [_without_folder(word) for word in argv[1:]]
    if not script.is_relative_to(ROOT):
        return shlex.join(["python", script.name, *words])
    shown = script.relative_to(ROOT)
    is_module = (ROOT / shown.parts[0] / "__init__.py").exists()
    name = ["-m", ".".join(shown.with_suffix("").parts)] if is_module else [str(shown)]
    return shlex.join(["python", *name, *words])


def _without_folder(word: str) -> str:
    flag, equals, value = word.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
