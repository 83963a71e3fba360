"""Loading a model must not import torch's compiler, which takes longer than the load itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.model_loader.loader import load_model

before = {*sys.modules}
load_model(load_model_config(str(resolve_model_path("demo"))), "auto", 64, torch.float32, "cpu")
new = {name.partition(".")[0] for name in {*sys.modules} - before}
print(*sorted(new & {"sympy"}), *({"torch._dynamo"} & {*sys.modules} - before))
"""


def test_a_load_imports_no_compiler_of_torch() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True)
    assert found.stdout.split() == []
