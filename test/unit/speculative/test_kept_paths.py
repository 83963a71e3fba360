"""The rows of confirmed paths that a head is fed again, against a loop over lists."""

from __future__ import annotations

import pytest

from interpreted import run_interpreted
from path_rows_cases import CASES, wrong_parts
from sglang.srt.speculative.kept_paths import torch_path_rows


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/path_rows_cases.py", "triton", request)


@pytest.mark.parametrize("case", CASES)
def test_torch_finds_the_rows(case: str) -> None:
    assert wrong_parts(torch_path_rows, *CASES[case], "cpu") == []


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES)
def test_an_interpreted_kernel_finds_the_rows(found: dict[str, float | str], case: str) -> None:
    assert found[case] == ""
