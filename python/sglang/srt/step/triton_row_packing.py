"""Packed steps on a GPU: three kernels of one program each; the second divides the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin
from sglang.srt.step import step_ops
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.row_division import WantedRows
from sglang.srt.step.step_sizes import MAX_DRAFTS, MAX_MASKS, MAX_REQUESTS
from sglang.srt.step.triton_commit_run import step_launch
from sglang.srt.step.triton_row_division import TritonRowDivision

_Q_LEN = tl.constexpr(step_ops.Q_LEN)
_Q_START = tl.constexpr(step_ops.Q_START)
_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)
_EMITS = tl.constexpr(step_ops.EMITS)
_NUM_PREDICTED = tl.constexpr(step_ops.NUM_PREDICTED)
_NUM_READ = tl.constexpr(step_ops.NUM_READ)
_READ_START = tl.constexpr(step_ops.READ_START)
_EMITS_ONLY_CONFIRMED = tl.constexpr(step_ops.EMITS_ONLY_CONFIRMED)


@triton.jit
def _is_cut(own, num_reqs, exists):
    """Tells whether requests may lose look-ahead."""
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs, mask=exists, other=1)
    only_confirmed = tl.load(own + _EMITS_ONLY_CONFIRMED * num_reqs, mask=exists, other=0)
    return (num_prompt == 0) & (only_confirmed != 0)


@triton.jit(do_not_specialize=["num_reqs", "out_stride", "early"])
def _wanted_kernel(
    per_request_ptr, pending_lens_ptr, out_ptr, num_reqs, out_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (1). out_ptr: [3, out_stride]; the counts of `WantedRows`: least, drafts, masks."""
    begin(PDL, early)
    request = tl.arange(0, BLOCK)
    exists = request < num_reqs
    own = per_request_ptr + request
    row = tl.load(own, mask=exists, other=0)
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs, mask=exists, other=0)
    pending = tl.load(pending_lens_ptr + row, mask=exists, other=1)
    masks = tl.load(own + _NUM_PREDICTED * num_reqs, mask=exists, other=1) - 1
    masks = tl.maximum(masks, 0)
    is_cut = _is_cut(own, num_reqs, exists)
    most = tl.load(own + _Q_LEN * num_reqs, mask=exists, other=1) - 1
    drafts = tl.minimum(pending - 1, most)
    known = tl.where(num_prompt > 0, num_prompt, pending)
    out = out_ptr + request
    tl.store(out, tl.where(is_cut, 1, known + masks), mask=exists)
    tl.store(out + out_stride, tl.where(is_cut, drafts, 0), mask=exists)
    masks = tl.where(is_cut, tl.minimum(masks, most - drafts), 0)
    tl.store(out + 2 * out_stride, masks, mask=exists)


@triton.jit(do_not_specialize=["num_reqs", "early"])
def _packed_counts_kernel(
    per_request_ptr, q_starts_ptr, num_masks_kept_ptr, num_reqs,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (1). Overwrites the counts and places of rows fed, read and predicted."""
    begin(PDL, early)
    request = tl.arange(0, BLOCK)
    exists = request < num_reqs
    own = per_request_ptr + request
    start = tl.load(q_starts_ptr + request, mask=exists, other=0)
    q_len = tl.load(q_starts_ptr + 1 + request, mask=exists, other=0) - start
    masks = tl.load(num_masks_kept_ptr + request, mask=exists, other=0)
    emits = tl.load(own + _EMITS * num_reqs, mask=exists, other=0)
    predicted = tl.load(own + _NUM_PREDICTED * num_reqs, mask=exists, other=0)
    num_read = tl.load(own + _NUM_READ * num_reqs, mask=exists, other=0)
    is_cut = _is_cut(own, num_reqs, exists)
    predicted = tl.where(is_cut, (1 + masks) * emits, predicted)
    num_read = tl.where(is_cut, q_len, num_read)
    tl.store(own + _Q_LEN * num_reqs, q_len, mask=exists)
    tl.store(own + _Q_START * num_reqs, start, mask=exists)
    tl.store(own + _NUM_PREDICTED * num_reqs, predicted, mask=exists)
    tl.store(own + _NUM_READ * num_reqs, num_read, mask=exists)
    tl.store(own + _READ_START * num_reqs, tl.cumsum(num_read, 0) - num_read, mask=exists)


def can_pack(state: RequestRows) -> bool:
    """Tells whether device rows with confidences are few enough for the kernels."""
    assert state.confidence is not None, "Device rows without confidences."
    drafts, masks = state.confidence.drafts, state.confidence.masks
    fits = drafts.shape[1] <= MAX_DRAFTS and masks.shape[1] <= MAX_MASKS
    return fits and state.num_rows <= MAX_REQUESTS


class TritonRowPacking:
    """See `RowPacking`."""

    def __init__(self, device: torch.device, max_requests: int) -> None:
        self._division = TritonRowDivision(device, max_requests)
        self._block = max(32, triton.next_power_of_2(max_requests))
        self._launch = step_launch(device)

    def pack(self, per_request: torch.Tensor, state: RequestRows, num_rows: int) -> None:
        assert state.confidence is not None, "Device rows without confidences."
        num_reqs = per_request.shape[1]
        stride = num_reqs + num_reqs % 2  # each of the three begins at a multiple of 16 bytes
        wanted = torch.empty((3, stride), dtype=torch.int64, device=per_request.device)
        _wanted_kernel[(1,)](
            per_request, state.pending_lens, wanted, num_reqs, stride,
            BLOCK=self._block, **self._launch,
        )  # fmt: skip
        least, num_drafts, num_masks = (wanted[row, :num_reqs] for row in range(3))
        confidence = state.confidence
        divided = self._division.divide(
            WantedRows(
                least,
                num_drafts,
                num_masks,
                draft_confidence=confidence.drafts,
                mask_confidence=confidence.masks,
                rows=per_request[0],
            ),
            num_rows,
        )
        _packed_counts_kernel[(1,)](
            per_request, divided.q_starts, divided.num_masks_kept, num_reqs,
            BLOCK=self._block, **self._launch,
        )  # fmt: skip
