"""Decode attention over shared prefixes on a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from attention_cases import TOLERANCE
from shared_prefix_cases import SHARED_CASES, SharedCase, shared_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

LARGE = {
    f"groups of many tiles, {heads} heads, pages of {page_size}": SharedCase(
        groups=[(4096, 37), (1536, 16), (0, 20), (2048, 5), (160, 50)],
        own_lens=(1, 100, 17, 300),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=page_size,
        graph_spare=8,
    )
    for heads, page_size in (((32, 8), 1), ((32, 8), 16), ((16, 2), 1), ((8, 8), 16), ((14, 2), 1))
}
CASES = SHARED_CASES | LARGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_row_sees_the_keys_of_its_slots(name: str, dtype: torch.dtype) -> None:
    assert shared_error(CASES[name], "cuda", dtype) <= TOLERANCE[dtype]
