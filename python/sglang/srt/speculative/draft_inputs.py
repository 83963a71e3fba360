"""Lays out what a drafter's model is fed over the rows of a step of the target: tokens of its
requests."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.step.request_rows import RequestRows


def rows_of_requests(ends: torch.Tensor, inputs: ForwardBatch) -> torch.Tensor:
    """[T] int64; the row of the token table that each row fed belongs to, of padding any.

    Args:
        ends: [R] int64; place after the last row of each request.
    """
    places = torch.arange(inputs.input_ids.shape[0], device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    return inputs.rows[requests.clamp(max=len(ends) - 1)]


def next_tokens(state: RequestRows, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T] int64; the token at the position after each of positions [T] of rows [T]: of a prompt's
    row the prompt's next one, also at a chunk's end; of the last row kept the certain one; after
    rows that were not kept, any."""
    last = state.tokens.shape[1] - 1
    return state.tokens[rows, (positions + 1).clamp(max=last)].to(torch.int64)
