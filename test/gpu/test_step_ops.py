"""Step operations on a CUDA GPU against torch's on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.registry import OPERATIONS
from sglang.srt.speculative.triton_mask_ops import _num_confident_kernel, _propose_kernel
from sglang.srt.step import triton_row_division as division
from sglang.srt.step import triton_row_packing as packing
from sglang.srt.step import triton_step_ops as steps
from sglang.srt.step.triton_commit_run import commit_kernel, commit_run_kernel
from sglang.srt.step.triton_layout import lay_out_kernel
from step_ops_cases import ALL, CASES, OUTSIDE_CASES, PACKED, step_case

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table(name: str, case: str) -> None:
    assert CASES[case](name, "cuda") == []


@pytest.mark.parametrize("case", OUTSIDE_CASES)
def test_a_column_outside_of_its_row_is_neither_read_nor_written(case: str) -> None:
    assert OUTSIDE_CASES[case]("triton", "cuda") == []


def test_sizes_of_steps_compile_nothing_anew() -> None:
    def count() -> int:
        device = torch.cuda.current_device()
        kernels = (
            *(lay_out_kernel, commit_run_kernel, _num_confident_kernel, _propose_kernel),
            *(packing._wanted_kernel, packing._packed_counts_kernel, division._divide_kernel),
            *(commit_kernel, steps._write_table_kernel),
        )
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    def run(num_reqs: int) -> None:
        assert step_case(ALL, num_reqs, 8)("triton", "cuda") == []
        assert step_case(ALL, num_reqs, 8, plain=True)("triton", "cuda") == []
        assert step_case(PACKED, num_reqs, 8, packed_share=0.7)("triton", "cuda") == []

    for num_reqs in (5, 33):  # the kernels of packed steps are compiled by powers of two
        run(num_reqs)
    before = count()
    for num_reqs in (1, 2, 16, 40):
        run(num_reqs)
    assert count() == before


def test_parts_of_one_tensor_reach_the_host_in_one_copy() -> None:
    whole = torch.arange(12, device="cuda").view(3, 4)
    single = torch.arange(5, device="cuda")
    known = torch.tensor([7])
    parts = [whole[:, 0], whole[:, 2:], single, known]
    copied = HostCopy(parts).read()
    assert [part.tolist() for part in copied] == [part.tolist() for part in parts]
    assert copied[0].untyped_storage().data_ptr() == copied[1].untyped_storage().data_ptr()
