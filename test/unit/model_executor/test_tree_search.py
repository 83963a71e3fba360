"""Triton finds the same trees as torch, in the interpreter."""

from __future__ import annotations

import pytest

from interpreted import run_interpreted
from sglang.srt.model_executor.draft_tree_passes import TorchTreeSearch
from sglang.srt.model_executor.triton_tree_search import (
    MOST_TOPK,
    TritonTreeSearch,
    triton_tree_search,
)
from sglang.srt.step.draft_shapes import TreeShape
from tree_search_cases import CASES, arguments_of


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/tree_search_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_find_the_same_trees(found: dict[str, float | str], case: str) -> None:
    """Compares trees of random children, many of them equal, in whatever order; of several requests
    at once."""
    assert found[case] == ""


@pytest.mark.parametrize(
    ("topk", "kind"), [(MOST_TOPK, TritonTreeSearch), (MOST_TOPK + 1, TorchTreeSearch)]
)
def test_beams_that_are_too_wide_are_searched_by_torch(topk: int, kind: type) -> None:
    shape = TreeShape(topk, 2, 30)
    assert isinstance(triton_tree_search(*arguments_of(shape, 2, "cpu")), kind)
