"""Weights of 8 bits with scales: what they mean, and how others become such."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from sglang.srt.weight_format import CHANNEL, WeightFormat

CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max
MIN_CAPABILITY = (8, 9)  # of a GPU that multiplies in 8 bits
ALIGNMENT = 16  # features, of a weight that it multiplies


class ScaledWeight(NamedTuple):
    """A weight of 8 bits.

    Attributes:
        codes: [out_features, in_features] in `CODES`.
        scales: float32, of the shape that `form` gives.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    form: WeightFormat

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Computes the weight's values, rounded once: [out_features, in_features]."""
        factors, (num_rows, num_columns) = self.scales, self.codes.shape
        rows, columns = self.form.within(self.codes.shape)
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(columns, 1)[:, :num_columns]
        if rows > 1:
            factors = factors.repeat_interleave(rows, 0)[:num_rows]
        return (self.codes.to(torch.float32) * factors).to(dtype)

    def rows_from(self, start: int) -> ScaledWeight:
        """Returns the rows from the first one of a block on, as views."""
        return ScaledWeight(self.codes[start:], self.scales[start // self.form.rows :], self.form)


Weight: TypeAlias = torch.Tensor | ScaledWeight


def scaled(values: torch.Tensor, form: WeightFormat) -> ScaledWeight:
    """Rounds a weight [out_features, in_features] to 8 bits, the largest of each block to the
    largest code; on the device of the values."""
    (num_rows, num_columns), (rows, columns) = values.shape, form.within(values.shape)
    shape = form.scales_shape(values.shape)
    missing = 0, shape[1] * columns - num_columns, 0, shape[0] * rows - num_rows
    blocks = F.pad(values.to(torch.float32), missing)
    blocks = blocks.view(shape[0], rows, shape[1], columns)
    # A GPU divides by a number as it multiplies by the reciprocal, by a tensor as a host does.
    largest = torch.full((), LARGEST, device=values.device)
    scales = blocks.abs().amax((1, 3)) / largest
    scales.masked_fill_(scales == 0, 1.0)
    codes = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(CODES)
    codes = codes.view(shape[0] * rows, -1)[:num_rows, :num_columns]
    return ScaledWeight(codes, scales, form)


def multiplies(form: WeightFormat, dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether a device computes products with weights of this form, or the CPU does, as their
    values say. Otherwise they are held as their values."""
    if device.type == "cpu":
        return True
    is_able = torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    return is_able and form == CHANNEL and dtype == torch.bfloat16
