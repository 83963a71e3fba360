"""Tests how the rows of a step are divided among its requests: torch against a plain sort, and
Triton in its interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interpreted import run_interpreted
from row_division_cases import CASES
from sglang.srt.step.row_division import TorchRowDivision, WantedRows


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/row_division_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", CASES)
def test_torch(name: str) -> None:
    assert CASES[name]("torch", "cpu", 12) == []


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", CASES)
def test_interpreted_triton(differences: dict[str, float | str], name: str) -> None:
    assert differences[name] == ""


def wanted() -> WantedRows:
    """A prompt of 7 rows, then three requests with three drafts each, whose values are 0.9, 0.45,
    0.045, then 0.8, 0.64, 0.512, then 0.9, 0.81, 0.045."""
    return WantedRows(
        least=torch.tensor([7, 1, 1, 1]),
        num_drafts=torch.tensor([0, 3, 3, 3]),
        confidence=torch.tensor([[0.1] * 3, [0.9, 0.5, 0.1], [0.8] * 3, [0.9, 0.9, 0.0555556]]),
    )


@pytest.mark.parametrize(
    ("num_rows", "starts"),
    [
        (10, [0, 7, 8, 9, 10]),
        # Of two drafts that are worth 0.9 both have none before them; the earlier request's is
        # taken.
        (11, [0, 7, 9, 10, 11]),
        (12, [0, 7, 9, 10, 12]),
        (13, [0, 7, 9, 10, 13]),
        (16, [0, 7, 9, 13, 16]),
        (17, [0, 7, 10, 14, 17]),
        (19, [0, 7, 11, 15, 19]),
        (30, [0, 7, 11, 15, 19]),
        (8, [0, 7, 8, 8, 8]),
        (5, [0, 5, 5, 5, 5]),
    ],
)
def test_the_most_valuable_drafts_are_kept(num_rows: int, starts: list[int]) -> None:
    assert TorchRowDivision().divide(wanted(), num_rows).tolist() == starts


def test_tensors_of_another_shape_or_type_are_bugs() -> None:
    fine = wanted()
    bad = [
        replace(fine, num_drafts=fine.num_drafts[:2]),
        replace(fine, least=fine.least.int()),
        replace(fine, confidence=fine.confidence.double()),
        replace(fine, confidence=torch.ones(4, 65)),
        replace(fine, confidence=torch.ones(4, 6)[:, ::2]),
        replace(fine, confidence=torch.ones(3, 3)),  # and no `rows`
        WantedRows(
            *[each.repeat(129) for each in (fine.least, fine.num_drafts)], torch.ones(516, 3)
        ),
    ]
    for entry in bad:
        with pytest.raises(AssertionError):
            TorchRowDivision().divide(entry, 10)
    with pytest.raises(AssertionError, match="-1 rows"):
        TorchRowDivision().divide(fine, -1)
