"""Heads and draft models of the benchmarks: the bundled ones, inflated if the target is."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmark.environment import ROOT
from benchmark.mtp_model import INFLATED, SILENT_STD, SMALL_TARGET
from benchmark.random_model import DRAFT_GEOMETRIES

STANDALONE = "STANDALONE"
NEXTN = "NEXTN"
HEADS = {
    "EAGLE": "demo-eagle",
    "EAGLE3": "demo-eagle3",
    NEXTN: "demo-nextn",
    STANDALONE: "demo-draft",
}
DEFAULT_DRAFT_GEOMETRY = "llama-3.2-1b"
DRAFT_VOCAB_SIZE = 32000  # of published EAGLE-3 heads for this geometry


@contextmanager
def drafter_flags(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Flags of an Engine with the drafter of --algorithm: the bundled one, or what --draft-model
    names; inflated if the model is. None without an algorithm."""
    options = vars(arguments)
    algorithm = options.get("algorithm")
    if algorithm is None:
        yield {}
        return
    drafter = options.get("draft_model") or HEADS[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model_path == INFLATED:
            subprocess.run(inflate_command(drafter, folder, arguments), cwd=ROOT, check=True)
            drafter = folder
        yield {"speculative_algorithm": algorithm, "speculative_draft_model_path": drafter}


def inflate_command(drafter: str, folder: str, arguments: argparse.Namespace) -> list[str]:
    """Gives the command that writes a larger drafter that says what a small one says."""
    options = vars(arguments)
    is_small = arguments.geometry == "tiny"
    command = [sys.executable, "-m"]
    if arguments.algorithm == STANDALONE:
        device = "cpu" if arguments.device == "cpu" else "cuda"
        command += ["benchmark.inflate", "--model-path", drafter, "--device", device]
        name = "tiny" if is_small else options.get("draft_geometry") or DEFAULT_DRAFT_GEOMETRY
        geometry = asdict(DRAFT_GEOMETRIES[name]).items()
        sizes = {key.replace("_", "-"): size for key, size in geometry}
    else:
        command += ["benchmark.inflate_head", "--head", drafter]
        command += ["--algorithm", arguments.algorithm]
        sizes = SMALL_TARGET if is_small else {}
        if arguments.algorithm == "EAGLE3" and not is_small:
            sizes = {"draft-vocab-size": DRAFT_VOCAB_SIZE}
    command += ["--out", folder, "--silent-std", SILENT_STD]
    return command + [f"--{name}={size}" for name, size in sizes.items()]
