"""What a benchmark result says of where it was measured: machine, commit, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import sglang

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "numpy")
GPU_FIELDS = "name,driver_version,memory.total"


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
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--", ":!benchmark/results", ":!README.md")),
        "command": _command(),
        "versions": {
            "python": platform.python_version(),
            "sglang-adaptive": sglang.__version__,
            **_package_versions(),
            **_cuda_version(),
        },
    }


def _package_versions() -> dict[str, str]:
    """Of those that are installed: a CPU needs no Triton."""
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


def _command() -> str:
    script = Path(sys.argv[0]).resolve()
    if not script.is_relative_to(ROOT):
        return shlex.join(["python", script.name, *sys.argv[1:]])
    shown = script.relative_to(ROOT)
    is_module = (ROOT / shown.parts[0] / "__init__.py").exists()
    words = ["-m", ".".join(shown.with_suffix("").parts)] if is_module else [str(shown)]
    return shlex.join(["python", *words, *sys.argv[1:]])


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
