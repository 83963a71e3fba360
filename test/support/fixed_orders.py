"""Both orders of sums on a CPU. In place of sums in fixed orders products are larger by a factor:
so the two give different tokens, and KV of one shows wherever the other reads it. Each row may be
computed by itself too, so that it has the same bits in any company, which takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from recorded_graphs import ReplayableAttention, recorded_graphs, replayable_backends
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.layers.scaled_weight import Weight
from sglang.srt.registry import ATTENTION_BACKENDS, OPERATIONS, ROW_INDEPENDENT

FACTOR = 1.5


class LargerProducts(TorchOps):
    """Stands for operations whose sums go in fixed orders."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return super().linear(x, weight, bias) * FACTOR


class RowByRow(LargerProducts):
    """The same, each row by itself."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        product = super().linear
        return torch.cat(
            [
                x.new_empty((0, len(weight))),
                *(product(row, weight, bias) for row in x.split(1)),
            ]
        )

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalized = super().add_rms_norm
        residuals = [None] * len(x) if residual is None else residual.split(1)
        rows = zip(x.split(1), residuals, strict=True)
        found = [normalized(row, each, weight, eps) for row, each in rows]
        return torch.cat([x[:0], *(out for out, _ in found)]), torch.cat(
            [x[:0], *(total for _, total in found)]
        )


class OtherAttention(ReplayableAttention):
    """Stands for attention whose sums do."""


class AttentionRowByRow(OtherAttention):
    """The same, each row by itself."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        rows = zip(*(each.split(1) for each in (q, k, v, sees)), strict=True)
        return torch.cat([super(AttentionRowByRow, self).attend(*row) for row in rows])


@contextmanager
def both_orders_on_a_cpu(row_by_row: bool = False) -> Iterator[None]:
    """ROW_INDEPENDENT and graphs, as a CPU can have them."""
    layers, backend = (
        ("RowByRow", "AttentionRowByRow") if row_by_row else ("LargerProducts", "OtherAttention")
    )
    operations = replace(OPERATIONS["torch"], layers=f"{__name__}:{layers}")
    attention = {ROW_INDEPENDENT: f"{__name__}:{backend}"}
    with (
        recorded_graphs(),
        replayable_backends(),
        mock.patch.dict(ATTENTION_BACKENDS.entries, attention),
        mock.patch.dict(OPERATIONS, {ROW_INDEPENDENT: operations}),
    ):
        yield
