"""The end of a step, plain or with look-ahead, each in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch, report_outside
from sglang.srt.step import step_ops

_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)
_EMITS = tl.constexpr(step_ops.EMITS)
_NUM_READ = tl.constexpr(step_ops.NUM_READ)
_READ_START = tl.constexpr(step_ops.READ_START)
_EMITS_ONLY_CONFIRMED = tl.constexpr(step_ops.EMITS_ONLY_CONFIRMED)


def step_launch(device: torch.device) -> dict[str, int]:
    """Launch options of a kernel that calls `begin` and is so small that the next one may always
    start early."""
    return dependent_launch(device, 0)


@triton.jit
def store_inside(row_ptr, column, token, mask, table_width, outside_ptr):
    """Stores tokens of a row of the token table, but for columns outside of it."""
    is_inside = (column >= 0) & (column < table_width)
    report_outside(outside_ptr, column, mask & ~is_inside)
    tl.store(row_ptr + column, token, mask=mask & is_inside)


@triton.jit(do_not_specialize=["num_reqs", "padding_row", "early"])
def commit_kernel(
    per_request_ptr, kv_lens_ptr, tokens_ptr,
    committed_ptr, num_tokens_ptr, token_table_ptr, outside_ptr, out_ptr,
    num_reqs, table_width, padding_row,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (blocks of requests). A token that would be outside of its row is not stored."""
    begin(PDL, early)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = request < num_reqs
    own = per_request_ptr + request
    row = tl.load(own, mask=exists, other=0)
    kv_len = tl.load(kv_lens_ptr + request, mask=exists, other=0)
    tl.store(committed_ptr + row, kv_len, mask=exists & (row != padding_row))
    is_read = tl.load(own + _NUM_READ * num_reqs, mask=exists, other=0) > 0
    start = tl.load(own + _READ_START * num_reqs, mask=exists, other=0)
    drawn = tl.load(tokens_ptr + start, mask=is_read, other=0)
    is_inside = (kv_len >= 0) & (kv_len < table_width)
    report_outside(outside_ptr, kv_len, is_read & ~is_inside)
    place = token_table_ptr + row * table_width + kv_len
    known = tl.load(place, mask=exists & is_inside, other=0).to(tl.int64)
    tl.store(place, drawn.to(tl.int32), mask=is_read & is_inside)
    tl.store(num_tokens_ptr + row, kv_len + 1, mask=is_read)
    tl.store(out_ptr + request, tl.where(is_read, drawn, known), mask=exists)


@triton.jit(
    do_not_specialize=["num_reqs", "num_read", "path_width", "max_accepted", "padding_row", "early"]
)
def commit_run_kernel(
    per_request_ptr, num_pending_ptr, targets_ptr, num_confirmed_ptr, path_ptr,
    num_unconfirmed_ptr, committed_ptr, pending_lens_ptr, num_tokens_ptr, token_table_ptr,
    outside_ptr, out_ptr, out_path_ptr,
    num_reqs, num_read, path_width, max_accepted, table_width, padding_row,
    HAS_UNCONFIRMED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests). See `StepOps.commit_run`.

    Args:
        out_ptr: [R, 3 + max_accepted]; accepted, kept, drafts fed, tokens.
        out_path_ptr: [R, max_accepted] int32.
        BLOCK: max_accepted at least.
    """
    begin(PDL, early)
    request = tl.program_id(0)
    own = per_request_ptr + request
    row = tl.load(own)
    emits = tl.load(own + _EMITS * num_reqs)
    num_prompt = tl.load(own + _NUM_PROMPT * num_reqs)
    only_confirmed = tl.load(own + _EMITS_ONLY_CONFIRMED * num_reqs) != 0
    pending_len = tl.load(pending_lens_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + row)
    num_confirmed = tl.minimum(tl.load(num_confirmed_ptr + request), max_accepted - 1)
    num_confirmed = tl.where(only_confirmed, num_confirmed, 0)
    offset = tl.arange(0, BLOCK)
    is_token = offset < max_accepted
    step = tl.load(path_ptr + request * path_width + offset, mask=is_token, other=-1)
    run = num_confirmed + 1
    if HAS_UNCONFIRMED:
        run = tl.where(only_confirmed, run, tl.load(num_unconfirmed_ptr + request))
        step = tl.where(only_confirmed, step, offset)
    tl.store(out_path_ptr + request * max_accepted + offset, step.to(tl.int32), mask=is_token)
    place = tl.load(own + _READ_START * num_reqs) + tl.maximum(step, 0)
    token = tl.load(targets_ptr + tl.minimum(place, num_read - 1), mask=is_token, other=0)

    kept = tl.where(only_confirmed, run, pending_len)
    kept = tl.where(num_prompt > 0, num_prompt, kept)
    committed = tl.load(committed_ptr + row) + kept
    pending = tl.where(only_confirmed, 1, run)
    tl.store(committed_ptr + row, committed, mask=row != padding_row)
    tl.store(pending_lens_ptr + row, tl.where(emits != 0, pending, 1))
    tl.store(num_tokens_ptr + row, tl.where(emits != 0, committed + pending, num_tokens))
    column = committed - num_confirmed + offset
    sequence = token_table_ptr + row * table_width
    is_given = is_token & (offset < run * emits)
    store_inside(sequence, column, token.to(tl.int32), is_given, table_width, outside_ptr)
    out = out_ptr + request * (3 + max_accepted)
    tl.store(out, run * emits)
    tl.store(out + 1, kept)
    tl.store(out + 2, tl.load(num_pending_ptr + request) - 1)
    tl.store(out + 3 + offset, token, mask=is_token)
