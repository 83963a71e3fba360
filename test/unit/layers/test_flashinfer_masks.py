"""Masks of trees for FlashInfer, against the keys that each row is written out to see. FlashInfer
itself attends with them in test/gpu/test_flashinfer_backend.py."""

from __future__ import annotations

import pytest
import torch

from attention_cases import GROWN_CASES, PACKED_CASES, TREE_CASES, AttentionCase, PlacedCase
from sglang.srt.layers.attention.flashinfer_masks import MAX_ENTRIES, tree_masks
from sglang.srt.layers.attention.flashinfer_plan import lay_out

CASES = TREE_CASES | GROWN_CASES | {k: case for k, case in PACKED_CASES.items() if case.trees}


def written_out(placed: PlacedCase, window: int | None) -> list[bool]:
    """Request after request and row by row, whether each key of the request is seen."""
    found: list[bool] = []
    for request, (before, q_len) in enumerate(placed.case.shape):
        for row in range(q_len):
            seen = placed._seen(request, row)
            nearest = -1 if window is None else seen[-1][1] - window
            places = {place for place, depth in seen if depth > nearest}
            found += [place in places for place in range(before + q_len)]
    return found


@pytest.mark.long_matrix
@pytest.mark.parametrize("max_entries", [MAX_ENTRIES, 500])
@pytest.mark.parametrize("name", CASES)
def test_masks_are_what_rows_see(name: str, max_entries: int) -> None:
    case: AttentionCase = CASES[name]
    placed = PlacedCase(case, "cpu", torch.float32, seed=1)
    batch = placed.as_the_host_would_know_it()
    layout = lay_out(batch.q_lens, batch.kv_lens.tolist(), case.page_size)
    masks = tree_masks(batch, layout, case.windows, max_entries)
    assert set(masks) == set(case.windows)
    for window, mask in masks.items():
        assert mask.dtype == torch.bool
        assert mask.tolist() == written_out(placed, window), window
