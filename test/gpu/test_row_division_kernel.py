"""The division of a step's rows on a CUDA GPU against a plain sort, exactly."""

from __future__ import annotations

import pytest
import torch

from row_division_cases import CASES, NAMES, division
from sglang.srt.step.row_division import RowDivision, WantedRows
from sglang.srt.step.triton_row_division import TritonRowDivision, _divide_kernel

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


def divide(ours: RowDivision, num_reqs: int, num_rows: int, first: int = 0) -> torch.Tensor:
    """`first`: where tensors begin in their storage."""
    counts = torch.full((2, first + num_reqs), 2, device="cuda")
    counts[1] = 4
    least, num_drafts = (part[first:] for part in counts.unbind())
    confidence = torch.linspace(0, 1, num_reqs * 8, device="cuda").view(num_reqs, 8)
    rows = torch.arange(first + num_reqs, device="cuda")[first:] - first
    return ours.divide(WantedRows(least, num_drafts, confidence, rows), num_rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_the_table(name: str, case: str) -> None:
    assert CASES[case](name, "cuda", 12) == []


def test_sizes_of_steps_compile_nothing_anew() -> None:
    ours = TritonRowDivision(torch.device("cuda"), 64)
    divide(ours, 5, 20)
    cache = _divide_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for num_reqs, num_rows, first in ((1, 1, 0), (2, 16, 1), (16, 64, 0), (33, 7, 3), (64, 999, 1)):
        divide(ours, num_reqs, num_rows, first)
    assert len(cache) == before


@pytest.mark.parametrize("name", NAMES)
def test_it_never_waits_for_the_device(name: str) -> None:
    ours = division(name, "cuda", 64)
    divide(ours, 5, 20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        q_starts = divide(ours, 40, 200)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(q_starts[-1]) == 200


def test_the_same_memory_serves_one_division_after_the_other() -> None:
    """Each overwrites the values of the one before it, which may still run when it is launched."""
    ours = TritonRowDivision(torch.device("cuda"), 64)
    sizes = [(num_reqs, num_reqs * 4) for num_reqs in (64, 3, 50, 1, 33)] * 20
    results = [divide(ours, *size) for size in sizes]
    for result, size in zip(results, sizes, strict=True):
        assert torch.equal(result, divide(ours, *size))
        torch.cuda.synchronize()
