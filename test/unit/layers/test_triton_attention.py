"""The Triton backend in Triton's interpreter on the CPU, against `TorchNativeBackend`.

One process runs the whole table (`attention_cases.py`); the tests here each read one result.
"""

from __future__ import annotations

import os

import pytest
import torch

from attention_cases import (
    CASES,
    GATHER_CASES,
    MASKED,
    MORE_CASES,
    OUTSIDE_CASES,
    PACKED_WHOLE,
    TOLERANCE,
)
from block_attention import BLOCKS
from interpreted import run_interpreted
from sglang.srt.registry import ATTENTION_BACKENDS

BLOCK_CASES = [f"blocks, {name}" for name in BLOCKS]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/attention_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES, *BLOCK_CASES, "draft steps"])
def test_interpreted_kernels_equal_the_oracle(errors: dict[str, float | str], name: str) -> None:
    error = errors[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", MASKED)
def test_masks_that_hide_nothing_change_no_bit(errors: dict[str, float | str], name: str) -> None:
    assert errors[name] == 0.0


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", PACKED_WHOLE)
def test_a_packed_step_of_all_rows_changes_no_bit(
    errors: dict[str, float | str], name: str
) -> None:
    assert errors[name] == 0.0


@pytest.mark.parametrize("name", GATHER_CASES)
def test_kv_is_gathered_side_by_side(errors: dict[str, float | str], name: str) -> None:
    assert errors[name] == ""


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", OUTSIDE_CASES)
def test_a_length_past_its_row_reads_nothing_there_and_is_told(
    errors: dict[str, float | str], name: str
) -> None:
    assert errors[name] == ""


def test_without_the_interpreter_the_backend_refuses_a_cpu() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.skip("this process itself runs Triton's interpreter")
    capabilities = ATTENTION_BACKENDS.load("triton").capabilities()
    assert capabilities.problems("cpu", torch.float32, 16) == ["runs on ['cuda'], not on cpu"]
    assert capabilities.problems("cuda", torch.bfloat16, 1) == []
