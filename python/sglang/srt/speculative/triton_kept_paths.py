"""The rows of confirmed paths, found by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.speculative.kept_paths import KeptPaths, PathRows
from sglang.srt.step import step_ops

BLOCK = 64  # rows of a program, and requests that it counts the rows of at once
_Q_LEN = tl.constexpr(step_ops.Q_LEN)
_Q_START = tl.constexpr(step_ops.Q_START)
_NUM_PROMPT = tl.constexpr(step_ops.NUM_PROMPT)


@triton.jit
def _num_kept(per_request_ptr, kept_ptr, request, num_reqs, most, exists):
    """Rows of requests [n]; 0 of those that do not exist."""
    own = per_request_ptr + request
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + request, mask=exists, other=0)
    else:
        q_len = tl.load(own + _Q_LEN * num_reqs, mask=exists, other=0)
        num_prompt = tl.load(own + _NUM_PROMPT * num_reqs, mask=exists, other=0)
        kept = tl.where(num_prompt > 0, q_len, tl.minimum(q_len, most))
    return kept


@triton.jit(
    do_not_specialize=[
        "num_reqs", "path_width", "path_stride", "most", "table_width", "row_stride", "end_stride",
        "early",
    ]
)  # fmt: skip
def path_rows_kernel(
    per_request_ptr, kept_ptr, path_ptr, input_ids_ptr, positions_ptr, rows_ptr, kv_lens_ptr,
    table_ptr, out_ptr, ends_ptr,
    num_reqs, path_width, path_stride, most, table_width, row_stride, end_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, blocks of rows). See `PathRows`.

    Args:
        kept_ptr: None: see `KeptPaths.kept`.
        out_ptr: [4, row_stride] int64; input ids, positions, slots, sources.
        ends_ptr: [3, end_stride] int64; lengths of KV, starts, ends.
    """
    begin(PDL, early)
    request = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int64)
    own_kept = tl.zeros([BLOCK], tl.int64)
    for first in range(0, request + 1, BLOCK):
        other = first + tl.arange(0, BLOCK)
        rows = _num_kept(per_request_ptr, kept_ptr, other, num_reqs, most, other <= request)
        before += tl.where(other < request, rows, 0)
        own_kept += tl.where(other == request, rows, 0)
    start, kept = tl.sum(before), tl.sum(own_kept)
    own = per_request_ptr + request
    if tl.program_id(1) == 0:
        kv_len = tl.load(kv_lens_ptr + request) - tl.load(own + _Q_LEN * num_reqs) + kept
        tl.store(ends_ptr + request, kv_len)
        tl.store(ends_ptr + end_stride + request, start)
        tl.store(ends_ptr + 2 * end_stride + request, start + kept)
    if tl.program_id(1) * BLOCK >= kept:
        return

    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = offset < kept
    step = tl.minimum(offset, path_width - 1)
    node = tl.load(path_ptr + request * path_stride + step, mask=is_row, other=0)
    is_prompt = tl.load(own + _NUM_PROMPT * num_reqs) > 0
    step_start = tl.load(own + _Q_START * num_reqs)
    source = step_start + tl.where(is_prompt, offset, tl.maximum(node, 0))
    position = tl.load(positions_ptr + step_start) + offset
    slots = table_ptr + tl.load(rows_ptr + request) * table_width
    slot = tl.load(slots + position, mask=is_row & (position < table_width), other=0)
    token = tl.load(input_ids_ptr + source, mask=is_row, other=0)
    out = out_ptr + start + offset
    tl.store(out, token, mask=is_row)
    tl.store(out + row_stride, position, mask=is_row)
    tl.store(out + 2 * row_stride, slot.to(tl.int64), mask=is_row)
    tl.store(out + 3 * row_stride, source, mask=is_row)


def triton_path_rows(kept_paths: KeptPaths, page_table: torch.Tensor) -> PathRows:
    """As `torch_path_rows`."""
    inputs, path, fed = kept_paths.inputs, kept_paths.path, kept_paths.fed
    num_reqs, num_rows, device = len(fed), sum(fed), path.device
    # Each begins at a multiple of 16 bytes, which kernels are compiled for.
    row_stride, end_stride = num_rows + num_rows % 2, num_reqs + num_reqs % 2
    out = torch.empty((4, row_stride), dtype=torch.int64, device=device)
    ends = torch.empty((3, end_stride), dtype=torch.int64, device=device)
    num_blocks = triton.cdiv(max(fed), BLOCK)
    path_rows_kernel[(num_reqs, num_blocks)](
        kept_paths.per_request, kept_paths.kept, path, inputs.input_ids, inputs.positions,
        inputs.rows, inputs.kv_lens, page_table, out, ends,
        num_reqs, path.shape[1], path.stride(0), kept_paths.most, page_table.shape[1],
        row_stride, end_stride,
        BLOCK=BLOCK, num_warps=2, **dependent_launch(device, num_reqs * num_blocks),
    )  # fmt: skip
    return PathRows(*out[:, :num_rows], *ends[:, :num_reqs])
