"""Both orders of sums on a CPU: where a GPU would add up in fixed orders, products here are larger
by a factor. So the two give different tokens, and KV of one shows wherever the other reads it."""

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


class OtherAttention(ReplayableAttention):
    """Stands for attention whose sums do; plans of its own."""


@contextmanager
def both_orders_on_a_cpu() -> Iterator[None]:
    """ROW_INDEPENDENT and graphs, as a CPU can have them."""
    operations = replace(OPERATIONS["torch"], layers=f"{__name__}:LargerProducts")
    attention = {ROW_INDEPENDENT: f"{__name__}:OtherAttention"}
    with (
        recorded_graphs(),
        replayable_backends(),
        mock.patch.dict(ATTENTION_BACKENDS.entries, attention),
        mock.patch.dict(OPERATIONS, {ROW_INDEPENDENT: operations}),
    ):
        yield
