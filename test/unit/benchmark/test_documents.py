"""Figures in README.md and docs/ are those of the stored results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"


@pytest.mark.parametrize(
    "script",
    [
        "make_readme_table.py",
        "make_mtp_tables.py",
        "make_pause_table.py",
        "make_gpu_tables.py",
    ],
)
def test_the_measured_parts_are_what_the_results_say(script: str) -> None:
    command = [sys.executable, str(BENCHMARK / script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
