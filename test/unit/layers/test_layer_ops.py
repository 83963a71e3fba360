"""Layer operations against those of `TorchOps` in float64; Triton's in its interpreter."""

from __future__ import annotations

import pytest
import torch

from interpreted import run_interpreted
from layer_ops_cases import CASES, INTERPRETED, INTERPRETED_TYPES, TOLERANCE, max_error


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/layer_ops_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_torch(name: str, dtype: torch.dtype) -> None:
    assert max_error("torch", CASES[name], "cpu", dtype) <= TOLERANCE[dtype]


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", INTERPRETED_TYPES, ids=str)
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_triton(errors: dict[str, float | str], name: str, dtype: torch.dtype) -> None:
    error = errors[f"{name}, {dtype}"]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[dtype]
