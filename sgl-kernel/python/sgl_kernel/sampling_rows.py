"""The settings of each row of logits for `sample_tokens`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingRows(NamedTuple):
    """Parameters of the S rows to sample: contiguous, on the device of the logits.

    `SamplingView` in include/sgl_kernel/sampling_filters.cuh has the same fields in this order.

    Attributes:
        temperature: [S] float32; rows that hold 0 take the best token.
        top_k: [S] int64; keeps the k first tokens, all from V up.
        top_p: [S] float32; keeps the tokens whose mass before them is below it, all from 1 up.
        min_p: [S] float32; keeps the tokens with at least min_p times the best probability.
        seeds: [S] int64.
        positions: [S] int64; index in the sequence of the token that is drawn.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


INTEGERS = ("top_k", "seeds", "positions")
FLOATS = tuple(name for name in SamplingRows._fields if name not in INTEGERS)
