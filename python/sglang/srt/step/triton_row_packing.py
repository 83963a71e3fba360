"""Packed steps on a GPU: three kernels of one program each; the second divides the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin
from sglang.srt.step import step_ops
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.row_division import WantedRows
from sglang.srt.step.step_sizes import MAX_DRAFTS, MAX_REQUESTS
from sglang.srt.step.triton_commit_run import step_launch
from sglang.srt.step.triton_row_division import TritonRowDivision

_Q_LEN = tl.constexpr(step_ops.Q_LEN)
_Q_START = tl.constexpr(step_ops.Q_START)
_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)
_NUM_READ = tl.constexpr(step_ops.NUM_READ)
_READ_START = tl.constexpr(step_ops.READ_START)


@triton.jit(do_not_specialize=["num_reqs", "out_stride", "early"])
def _wanted_kernel(
    per_request_ptr, pending_lens_ptr, out_ptr, num_reqs, out_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (1). out_ptr: [2, out_stride]; the counts of `WantedRows`: least, drafts."""
    begin(PDL, early)
    request = tl.arange(0, BLOCK)
    exists = request < num_reqs
    own = per_request_ptr + request
    row = tl.load(own, mask=exists, other=0)
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs, mask=exists, other=0)
    pending = tl.load(pending_lens_ptr + row, mask=exists, other=1)
    most = tl.load(own + _Q_LEN * num_reqs, mask=exists, other=1)
    drafts = tl.minimum(pending, most) - 1
    tl.store(out_ptr + request, tl.maximum(num_prompt, 1), mask=exists)
    out = out_ptr + out_stride + request
    tl.store(out, tl.where(num_prompt > 0, 0, drafts), mask=exists)


@triton.jit(do_not_specialize=["num_reqs", "early"])
def _packed_counts_kernel(
    per_request_ptr, q_starts_ptr, num_reqs, BLOCK: tl.constexpr, PDL: tl.constexpr, early
):
    """Grid (1). Overwrites the counts and places of rows fed and read."""
    begin(PDL, early)
    request = tl.arange(0, BLOCK)
    exists = request < num_reqs
    own = per_request_ptr + request
    start = tl.load(q_starts_ptr + request, mask=exists, other=0)
    q_len = tl.load(q_starts_ptr + 1 + request, mask=exists, other=0) - start
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs, mask=exists, other=0)
    num_read = tl.load(own + _NUM_READ * num_reqs, mask=exists, other=0)
    num_read = tl.where(num_prompt == 0, q_len, num_read)
    tl.store(own + _Q_LEN * num_reqs, q_len, mask=exists)
    tl.store(own + _Q_START * num_reqs, start, mask=exists)
    tl.store(own + _NUM_READ * num_reqs, num_read, mask=exists)
    tl.store(own + _READ_START * num_reqs, tl.cumsum(num_read, 0) - num_read, mask=exists)


def can_pack(state: RequestRows) -> bool:
    """Tells whether device rows with confidences are few enough for the kernels."""
    assert state.confidence is not None, "Device rows without confidences."
    return state.confidence.shape[1] <= MAX_DRAFTS and state.num_rows <= MAX_REQUESTS


class TritonRowPacking:
    """See `RowPacking`."""

    def __init__(self, device: torch.device, max_requests: int) -> None:
        self._division = TritonRowDivision(device, max_requests)
        self._block = max(32, triton.next_power_of_2(max_requests))
        self._launch = step_launch(device)

    def pack(self, per_request: torch.Tensor, state: RequestRows, num_rows: int) -> None:
        assert state.confidence is not None, "Device rows without confidences."
        num_reqs = per_request.shape[1]
        stride = num_reqs + num_reqs % 2  # both begin at a multiple of 16 bytes
        wanted = torch.empty((2, stride), dtype=torch.int64, device=per_request.device)
        _wanted_kernel[(1,)](
            per_request, state.pending_lens, wanted, num_reqs, stride,
            BLOCK=self._block, **self._launch,
        )  # fmt: skip
        least, num_drafts = wanted[:, :num_reqs]
        parts = WantedRows(least, num_drafts, state.confidence, rows=per_request[0])
        q_starts = self._division.divide(parts, num_rows)
        _packed_counts_kernel[(1,)](
            per_request, q_starts, num_reqs, BLOCK=self._block, **self._launch
        )
