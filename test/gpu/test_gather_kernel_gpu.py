"""The kernel that gathers the KV of prompts is compiled at start-up, not when a request waits."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from sglang.srt.layers.attention.triton_ops.gather_kernel import _gather_kv_kernel, gather_kv
from sglang.srt.layers.attention.triton_ops.kernels import Paged

ALIGNMENT, LENGTH = 64, 100


def test_it_is_compiled_once_wherever_the_places_of_a_step_lie() -> None:
    """They lie behind the items, so their address is a multiple of 16 in some steps only."""
    kv = torch.randn(256, 4, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(256, device="cuda")[:128].view(1, 128).to(torch.int32)
    paged = Paged(
        table=table,
        rows=torch.zeros(4, dtype=torch.int64, device="cuda"),
        kv_lens=torch.full((4,), LENGTH, dtype=torch.int64, device="cuda"),
    )
    numbers = torch.zeros(64, dtype=torch.int32, device="cuda")
    place = torch.tensor([0, 0, 2 * ALIGNMENT], dtype=torch.int32, device="cuda")
    cache = _gather_kv_kernel.device_caches[torch.cuda.current_device()][0]
    counts = set()
    for first in range(8):
        numbers[first : first + 3] = place
        out = torch.full((2 * ALIGNMENT, 4, 64), -1.0, device="cuda", dtype=torch.bfloat16)
        gather_kv(kv, out, numbers[first : first + 3].view(1, 3), paged, LENGTH, ALIGNMENT)
        assert torch.equal(out[:LENGTH], kv[table[0, :LENGTH].long()])
        counts.add(len(cache))
    assert len(counts) == 1, "compiled again for another address"
