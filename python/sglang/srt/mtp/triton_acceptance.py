"""Acceptance of a step's predictions in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, report_outside
from sglang.srt.mtp.acceptance import AcceptedTokens, DrawnTokens
from sglang.srt.step import step_ops
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import NUM_COUNTS
from sglang.srt.step.triton_step_ops import step_launch

_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)
_EMITS = tl.constexpr(step_ops.EMITS)
_NUM_PREDICTED = tl.constexpr(step_ops.NUM_PREDICTED)
_READ_START = tl.constexpr(step_ops.READ_START)
_EMITS_ONLY_CONFIRMED = tl.constexpr(step_ops.EMITS_ONLY_CONFIRMED)


@triton.jit
def _store_inside(row_ptr, column, token, mask, table_width, outside_ptr):
    """Stores tokens of a row, but for columns outside of it."""
    is_inside = (column >= 0) & (column < table_width)
    report_outside(outside_ptr, column, mask & ~is_inside)
    tl.store(row_ptr + column, token, mask=mask & is_inside)


@triton.jit(do_not_specialize=["num_reqs", "num_read", "max_rows_read", "max_accepted", "early"])
def _accept_kernel(
    per_request_ptr, tokens_ptr, probs_ptr, thresholds_ptr,
    committed_ptr, pending_lens_ptr, num_tokens_ptr, token_table_ptr, outside_ptr, out_ptr,
    num_reqs, num_read, max_rows_read, max_accepted, max_pending, table_width,
    HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests). See `acceptance.decide_acceptance`.

    Args:
        out_ptr: [R, 2 + max_accepted]; accepted, kept, tokens.
        BLOCK: max_pending at least.
    """
    begin(PDL, early)
    request = tl.program_id(0)
    own = per_request_ptr + request
    row = tl.load(own)
    start = tl.load(own + _READ_START * num_reqs)
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs)
    num_predicted = tl.load(own + _NUM_PREDICTED * num_reqs)
    emits_only_confirmed = tl.load(own + _EMITS_ONLY_CONFIRMED * num_reqs) != 0
    committed = tl.load(committed_ptr + row)
    pending_len = tl.load(pending_lens_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + row)

    offset = tl.arange(0, BLOCK)
    sequence = token_table_ptr + row * table_width
    target = tl.load(tokens_ptr + tl.minimum(start + offset, num_read - 1))
    is_draft = (offset < tl.minimum(max_pending - 1, max_rows_read)) & (offset < pending_len - 1)
    column = committed + 1 + offset
    is_inside = (column >= 0) & (column < table_width)
    draft = tl.load(sequence + column, mask=is_draft & is_inside, other=0)
    is_right = is_draft & (draft == target) & emits_only_confirmed
    num_confirmed = tl.min(tl.where(is_right, BLOCK, offset), 0)
    is_mismatch = emits_only_confirmed & (num_confirmed < pending_len - 1)

    window = tl.minimum(num_confirmed + offset, max_rows_read - 1)
    place = tl.minimum(start + window, num_read - 1)
    is_confident = offset < tl.where(is_mismatch, 1, num_predicted)
    if HAS_PROBS:
        threshold = tl.load(thresholds_ptr + row)
        is_confident = is_confident & (tl.load(probs_ptr + place) >= threshold)
    is_confident = is_confident | ((offset == 0) & emits_only_confirmed)
    is_confident = is_confident & (offset < max_pending)
    next_len = tl.maximum(tl.min(tl.where(is_confident, BLOCK, offset), 0), 1)

    emitted = tl.where(emits_only_confirmed, num_confirmed + 1, next_len)
    kept = tl.where(emits_only_confirmed, num_confirmed + 1, pending_len)
    kept = tl.where(num_prompt > 0, num_prompt, kept)
    emits = tl.load(own + _EMITS * num_reqs)
    token = tl.load(tokens_ptr + place).to(tl.int32)
    first, is_next = committed + kept, offset < next_len * emits
    _store_inside(sequence, first + offset, token, is_next, table_width, outside_ptr)
    tl.store(num_tokens_ptr + row, tl.where(emits != 0, first + next_len, num_tokens))
    tl.store(pending_lens_ptr + row, next_len)
    tl.store(committed_ptr + row, first)
    out = out_ptr + request * (2 + max_accepted)
    tl.store(out, emitted * emits)
    tl.store(out + 1, kept)
    tl.store(out + 2 + offset, target, mask=offset < max_accepted)


class TritonAcceptance:
    """See `AcceptanceOps`."""

    def __init__(self, state: RequestRows, thresholds: torch.Tensor) -> None:
        self._state = state
        self._thresholds = thresholds
        self._block = max(2, triton.next_power_of_2(state.max_pending))
        self._launch = step_launch(thresholds.device)
        per_request = torch.zeros((NUM_COUNTS, 1), dtype=torch.int64, device=thresholds.device)
        for probs in (None, torch.zeros(1, device=thresholds.device)):  # both are compiled
            self.accept(DrawnTokens(per_request, per_request[0], probs, 1, 1))

    def accept(self, drawn: DrawnTokens) -> AcceptedTokens:
        state, tokens, probs = self._state, drawn.tokens, drawn.probs
        num_reqs, width = drawn.per_request.shape[1], drawn.max_accepted
        assert width <= state.max_pending, "More tokens than can be pending."
        out = torch.empty((num_reqs, 2 + width), dtype=torch.int64, device=tokens.device)
        _accept_kernel[(num_reqs,)](
            drawn.per_request, tokens, probs, self._thresholds,
            state.committed, state.pending_lens, state.num_tokens, state.tokens, state.outside, out,
            num_reqs, len(tokens), drawn.max_rows_read, width, state.max_pending,
            state.tokens.shape[1],
            HAS_PROBS=probs is not None, BLOCK=self._block, num_warps=1, **self._launch,
        )  # fmt: skip
        return AcceptedTokens(out[:, 0], out[:, 1], out[:, 2:])
