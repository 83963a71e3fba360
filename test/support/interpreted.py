"""Runs a conformance table in a process of its own, with Triton's interpreter on the CPU: Triton
reads TRITON_INTERPRET where kernels are defined."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from code_shape import ROOT

TIMEOUT_S = 900.0  # twenty times what the longest table takes on a machine of its own


def run_interpreted(program: str, name: str) -> dict[str, float | str]:
    """The lines that `test/<program> <name>` prints: the largest error of each case, or what was
    wrong with it."""
    paths = (ROOT, ROOT / "python", ROOT / "sgl-kernel/python", ROOT / "test/support")
    process = subprocess.run(
        [sys.executable, ROOT / "test/support/quick_interpreter.py", ROOT / "test" / program, name],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, f"the table ended early:\n{process.stderr}"
    return dict(json.loads(line) for line in process.stdout.splitlines())
