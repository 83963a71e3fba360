"""Layer operations on a CUDA GPU against `TorchOps` in float64 of the same values."""

from __future__ import annotations

import pytest
import torch

from layer_ops_cases import CASES, TOLERANCE, max_error
from sglang.srt.registry import OPERATIONS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table(name: str, case: str, dtype: torch.dtype) -> None:
    assert max_error(name, CASES[case], "cuda", dtype) <= TOLERANCE[dtype]
