"""Rows are given to the experts that they choose: Triton's kernels in its interpreter."""

from __future__ import annotations

import pytest

from expert_pairs_cases import CASES
from interpreted import run_interpreted


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/expert_pairs_cases.py", "triton", request)


@pytest.mark.parametrize("name", CASES)
def test_pairs_are_in_blocks_of_their_experts(errors: dict[str, float | str], name: str) -> None:
    error = errors[name]
    assert isinstance(error, float), error
    assert error <= 1e-6
