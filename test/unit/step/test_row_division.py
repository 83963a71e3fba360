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
    """A prompt of 7 rows with two masks, then two requests with three drafts and two masks: values
    of drafts 0.9, 0.45, 0.045 and 0.8, 0.64, 0.512; of masks 0.9, 0.81, then 0.045, 0.0225, then
    0.512, 0.256."""
    return WantedRows(
        least=torch.tensor([7, 1, 1]),
        num_drafts=torch.tensor([0, 3, 3]),
        num_masks=torch.tensor([2, 2, 2]),
        draft_confidence=torch.tensor([[0.1, 0.1, 0.1], [0.9, 0.5, 0.1], [0.8, 0.8, 0.8]]),
        mask_confidence=torch.tensor([[0.9, 0.9], [1.0, 0.5], [1.0, 0.5]]),
    )


@pytest.mark.parametrize(
    ("num_rows", "starts", "drafts", "masks"),
    [
        (9, [0, 7, 8, 9], [0, 0, 0], [0, 0, 0]),
        # Of two rows that are worth 0.9 both have none before them; the earlier request's is taken.
        (10, [0, 8, 9, 10], [0, 0, 0], [1, 0, 0]),
        (12, [0, 9, 11, 12], [0, 1, 0], [2, 0, 0]),
        (15, [0, 9, 11, 15], [0, 1, 3], [2, 0, 0]),
        (17, [0, 9, 12, 17], [0, 2, 3], [2, 0, 1]),
        (21, [0, 9, 15, 21], [0, 3, 3], [2, 2, 2]),
        (30, [0, 9, 15, 21], [0, 3, 3], [2, 2, 2]),
        (8, [0, 7, 8, 8], [0, 0, 0], [0, 0, 0]),
        (5, [0, 5, 5, 5], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_the_most_valuable_rows_are_kept(
    num_rows: int, starts: list[int], drafts: list[int], masks: list[int]
) -> None:
    divided = TorchRowDivision().divide(wanted(), num_rows)
    assert divided.q_starts.tolist() == starts
    assert divided.num_drafts_kept.tolist() == drafts
    assert divided.num_masks_kept.tolist() == masks


def test_tensors_of_another_shape_or_type_are_bugs() -> None:
    fine = wanted()
    bad = [
        replace(fine, num_masks=fine.num_masks[:2]),
        replace(fine, least=fine.least.int()),
        replace(fine, mask_confidence=fine.mask_confidence.double()),
        replace(fine, draft_confidence=torch.ones(3, 65)),
        replace(fine, mask_confidence=torch.ones(3, 17)),
        replace(fine, mask_confidence=torch.ones(3, 4)[:, ::2]),
        replace(fine, draft_confidence=torch.ones(2, 3)),  # and no `rows`
        replace(fine, least=fine.least.repeat(171)),
    ]
    for entry in bad:
        with pytest.raises(AssertionError):
            TorchRowDivision().divide(entry, 10)
    with pytest.raises(AssertionError, match="-1 rows"):
        TorchRowDivision().divide(fine, -1)
