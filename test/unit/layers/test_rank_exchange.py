"""Ranks that write into each other's memory get the sum: the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest

from interpreted import run_interpreted
from rank_exchange_cases import CASES


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/rank_exchange_cases.py", "triton", request)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_bits_of_a_sum_in_their_order(
    errors: dict[str, float | str], name: str
) -> None:
    assert errors[name] == 0
