"""Turns the predictions of mask tokens into accepted tokens or drafts, each in one Triton
kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin
from sglang.srt.speculative.drafter import ChosenTokens
from sglang.srt.step import step_ops
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    NUM_COUNTS,
    AcceptedTokens,
    LookaheadLayout,
    ReadRows,
    RowLayout,
)
from sglang.srt.step.triton_commit_run import step_launch, store_inside

_EMITS = tl.constexpr(step_ops.EMITS)
_NUM_PREDICTED = tl.constexpr(step_ops.NUM_PREDICTED)
_READ_START = tl.constexpr(step_ops.READ_START)
_EMITS_ONLY_CONFIRMED = tl.constexpr(step_ops.EMITS_ONLY_CONFIRMED)


@triton.jit
def _confident_run(
    probs_ptr, thresholds_ptr, row, first, count, num_read,
    HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts how many rows in a row, of the `count` rows read from `first` on, reach the row's
    threshold; `count` is less than BLOCK."""
    offset = tl.arange(0, BLOCK)
    is_confident = offset < count
    if HAS_PROBS:
        place = tl.minimum(tl.maximum(first + offset, 0), num_read - 1)
        is_confident = is_confident & (tl.load(probs_ptr + place) >= tl.load(thresholds_ptr + row))
    return tl.min(tl.where(is_confident, BLOCK, offset), 0)


@triton.jit(do_not_specialize=["num_reqs", "num_read", "early"])
def _num_confident_kernel(
    per_request_ptr, probs_ptr, thresholds_ptr, out_ptr, num_reqs, num_read,
    HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests)."""
    begin(PDL, early)
    own = per_request_ptr + tl.program_id(0)
    first = tl.load(own + _READ_START * num_reqs)
    count = tl.load(own + _NUM_PREDICTED * num_reqs)
    row = tl.load(own)
    run = _confident_run(probs_ptr, thresholds_ptr, row, first, count, num_read, HAS_PROBS, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.maximum(run, 1))


@triton.jit(do_not_specialize=["num_reqs", "num_read", "accept_stride", "early"])
def _propose_kernel(
    per_request_ptr, num_pending_ptr, accept_lens_ptr, targets_ptr, probs_ptr, thresholds_ptr,
    committed_ptr, pending_lens_ptr, num_tokens_ptr, token_table_ptr, outside_ptr,
    num_reqs, num_read, accept_stride, table_width,
    HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests)."""
    begin(PDL, early)
    request = tl.program_id(0)
    own = per_request_ptr + request
    row = tl.load(own)
    num_confirmed = tl.load(accept_lens_ptr + request * accept_stride) - 1
    is_whole = num_confirmed == tl.load(num_pending_ptr + request) - 1
    is_lossless = tl.load(own + _EMITS_ONLY_CONFIRMED * num_reqs) != 0
    proposes = is_whole & is_lossless & (tl.load(own + _EMITS * num_reqs) != 0)
    count = tl.where(proposes, tl.load(own + _NUM_PREDICTED * num_reqs) - 1, 0)
    first = tl.load(own + _READ_START * num_reqs) + num_confirmed + 1
    run = _confident_run(probs_ptr, thresholds_ptr, row, first, count, num_read, HAS_PROBS, BLOCK)
    offset = tl.arange(0, BLOCK)
    exists = offset < run
    has_drafts = run > 0
    token = tl.load(targets_ptr + first + offset, mask=exists, other=0).to(tl.int32)
    committed = tl.load(committed_ptr + row)
    sequence = token_table_ptr + row * table_width
    store_inside(sequence, committed + 1 + offset, token, exists, table_width, outside_ptr)
    tl.store(pending_lens_ptr + row, 1 + run, mask=has_drafts)
    tl.store(num_tokens_ptr + row, committed + 1 + run, mask=has_drafts)


class TritonMaskOps:
    """See `MaskOps`."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        self._state = state
        self._thresholds = thresholds
        self._block = max(2, triton.next_power_of_2(state.max_pending + 1))
        self._launch = step_launch(thresholds.device)
        self._compile(thresholds.device)

    def _compile(self, device: torch.device) -> None:
        """Runs each kernel with and without probabilities, for a request that emits nothing."""
        per_request = torch.zeros((NUM_COUNTS, 1), dtype=torch.int64, device=device)
        numbers, zero = torch.zeros((5, 1), dtype=torch.int64, device=device), per_request[0]
        lookahead = LookaheadLayout(numbers.view(-1)[:2], zero, None, None)
        layout = RowLayout(per_request, zero, zero, zero, zero, ReadRows(*numbers), lookahead)
        for probs in (None, torch.zeros(1, device=device)):
            chosen = ChosenTokens(layout, zero, probs)
            self.num_confident(chosen)
            self.propose(chosen, AcceptedTokens(zero, zero, zero[:, None]))

    def num_confident(self, chosen: ChosenTokens) -> torch.Tensor:
        per_request, probs = chosen.layout.per_request, chosen.probs
        num_reqs = per_request.shape[1]
        out = torch.empty(num_reqs, dtype=torch.int64, device=per_request.device)
        _num_confident_kernel[(num_reqs,)](
            per_request, probs, self._thresholds, out, num_reqs, len(chosen.targets),
            HAS_PROBS=probs is not None, BLOCK=self._block, num_warps=1, **self._launch,
        )  # fmt: skip
        return out

    def propose(self, chosen: ChosenTokens, accepted: AcceptedTokens) -> None:
        layout, probs, state = chosen.layout, chosen.probs, self._state
        assert layout.lookahead is not None, "A step without look-ahead."
        per_request, accept_lens = layout.per_request, accepted.accept_lens
        num_reqs = per_request.shape[1]
        _propose_kernel[(num_reqs,)](
            per_request, layout.lookahead.num_pending, accept_lens, chosen.targets, probs,
            self._thresholds, state.committed, state.pending_lens, state.num_tokens, state.tokens,
            state.outside,
            num_reqs, len(chosen.targets), accept_lens.stride(0), state.tokens.shape[1],
            HAS_PROBS=probs is not None, BLOCK=self._block, num_warps=1, **self._launch,
        )  # fmt: skip
