"""The Triton backend in Triton's interpreter on the CPU, against `TorchNativeBackend`.

Triton reads TRITON_INTERPRET where kernels are defined, so one process of its own runs the whole
table (`attention_cases.py`), and the tests here each read one of its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from attention_cases import CASES, TOLERANCE
from code_shape import ROOT
from sglang.srt.registry import ATTENTION_BACKENDS


@pytest.fixture(scope="module")
def errors() -> dict[str, float | str]:
    """The largest error of each case, or what was wrong with it."""
    paths = (ROOT / "python", ROOT / "test")
    process = subprocess.run(
        [sys.executable, ROOT / "test/attention_cases.py", "triton"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, f"the table ended early:\n{process.stderr}"
    return dict(json.loads(line) for line in process.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_equal_torch_native(errors: dict[str, float | str], name: str) -> None:
    error = errors[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[torch.float32]


def test_without_the_interpreter_the_backend_refuses_a_cpu() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.skip("this process itself runs Triton's interpreter")
    capabilities = ATTENTION_BACKENDS.load("triton").capabilities()
    assert capabilities.problems("cpu", torch.float32, 16) == ["runs on ['cuda'], not on cpu"]
    assert capabilities.problems("cuda", torch.bfloat16, 1) == []
