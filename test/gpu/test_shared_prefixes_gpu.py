"""Decode attention over shared prefixes on a CUDA GPU: its kernels against float64, and answers of
a model, in graphs, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention_cases import TOLERANCE
from long_prompts import FAMILIES, Serving, check_cached_prefixes, long_model
from sglang.srt.layers.attention.shared_prefixes import SharedPrefixAttention
from sglang.srt.mem_cache import shared_prefixes
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
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.08}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_row_sees_the_keys_of_its_slots(name: str, dtype: torch.dtype) -> None:
    assert shared_error(CASES[name], "cuda", dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_prompts_that_share_prefixes(
    family: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_TOKENS", 0)
    num_planned, plan = [], SharedPrefixAttention.plan

    def count(self: SharedPrefixAttention, prefixes: list[object], *more: object) -> None:
        num_planned.append(len(prefixes))
        plan(self, prefixes, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedPrefixAttention, "plan", count)
    serving = Serving(
        long_model(tmp_path / "long", family, **SIZES),
        context_len=4096,
        num_slots=40_000,
        device="cuda",
        attention_backend="triton",
        dtype="float16",
        max_graph_width=1,
    )
    check_cached_prefixes(serving, (511, 999, 1000, 1000, 1001, 2047), 8192, page_size)
    assert max(num_planned) > 0, "No step shared a prefix."
