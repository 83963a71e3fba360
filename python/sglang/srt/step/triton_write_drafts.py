"""Writes drafts after the certain tokens of requests, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin
from sglang.srt.step import request_rows
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.triton_commit_run import step_launch, store_inside

_PRIOR_CONFIDENCE = tl.constexpr(request_rows.PRIOR_CONFIDENCE)


@triton.jit(do_not_specialize=["width", "token_stride", "told_stride", "early"])
def _write_drafts_kernel(
    rows_ptr, tokens_ptr, num_drafts_ptr, told_ptr,
    committed_ptr, pending_lens_ptr, num_tokens_ptr, token_table_ptr, outside_ptr, confidence_ptr,
    width, token_stride, told_stride, table_width, confidence_width,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests). See `RequestRows.write_drafts`.

    Args:
        tokens_ptr, told_ptr: [R, width], each row of which lies in one piece.
        num_drafts_ptr: [R]; None: all have `width`.
        confidence_ptr: `RequestRows.confidence`, [N, confidence_width].
        BLOCK: width at least.
    """
    begin(PDL, early)
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    count = row * 0 + width
    if num_drafts_ptr is not None:
        count = tl.load(num_drafts_ptr + request)
    offset = tl.arange(0, BLOCK)
    exists = offset < tl.minimum(count, width)
    token = tl.load(tokens_ptr + request * token_stride + offset, mask=exists, other=0)
    committed = tl.load(committed_ptr + row)
    sequence = token_table_ptr + row * table_width
    column = committed + 1 + offset
    store_inside(sequence, column, token.to(tl.int32), exists, table_width, outside_ptr)
    if confidence_ptr is not None:
        told = tl.full([BLOCK], _PRIOR_CONFIDENCE, tl.float32)
        if told_ptr is not None:
            told = tl.load(told_ptr + request * told_stride + offset, mask=exists, other=0.0)
        is_told = offset < tl.where(count > 0, width, 0)
        out = confidence_ptr + row * confidence_width + offset
        tl.store(out, tl.where(exists, told, 0.0), mask=is_told)
    tl.store(pending_lens_ptr + row, 1 + count, mask=count > 0)
    tl.store(num_tokens_ptr + row, committed + 1 + count, mask=count > 0)


def write_drafts(
    state: RequestRows,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    num_drafts: torch.Tensor | None,
    confidence: torch.Tensor | None,
) -> None:
    """Writes chains as `RequestRows.write_drafts` does; trees are written apart."""
    width = tokens.shape[1]
    assert width < state.max_pending, "More drafts than may be pending."
    table = state.confidence
    told = None if table is None else confidence
    assert tokens.stride(1) == 1, "Rows lie in one piece."
    assert told is None or told.stride(1) == 1, "Rows lie in one piece."
    _write_drafts_kernel[(len(rows),)](
        rows, tokens, num_drafts, told,
        state.committed, state.pending_lens, state.num_tokens, state.tokens, state.outside, table,
        width, tokens.stride(0), 0 if told is None else told.stride(0), state.tokens.shape[1],
        state.max_pending - 1,
        BLOCK=max(2, triton.next_power_of_2(state.max_pending)), num_warps=1,
        **step_launch(rows.device),
    )  # fmt: skip
