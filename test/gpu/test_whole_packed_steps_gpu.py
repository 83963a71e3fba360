"""With Triton and without graphs, a packed step that feeds all rows gives bit for bit what the
uniform step of these rows does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from eagle_models import write_models
from round_serving import On
from whole_packed_steps import assert_no_bit_differs, seen_steps

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

ON_GPU = On("cuda", "triton")


@pytest.mark.parametrize(("kind", "page_size"), [(EAGLE, 1), (EAGLE3, 16)])
def test_no_bit_of_hidden_states_and_logits_differs(
    tmp_path: Path, kind: str, page_size: int
) -> None:
    paths = write_models(tmp_path)
    packed, uniform = (
        seen_steps(paths, kind, ON_GPU, page_size, tmp_path, is_packed)
        for is_packed in (True, False)
    )
    assert_no_bit_differs(packed, uniform)
