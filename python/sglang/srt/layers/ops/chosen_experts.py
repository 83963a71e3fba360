"""Sends each row through the experts that its scores choose; the products are the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes what the expert of each row makes of it, [T * K, hidden_size], of rows
[T * K, hidden_size] that are sorted by their experts [T * K] int64."""


class Chosen(NamedTuple):
    """The experts of each row.

    Attributes:
        weights: [T, K], in the type of the scores, but at least of 32 bits.
        experts: [T, K] int64.
    """

    weights: torch.Tensor
    experts: torch.Tensor


def choose_experts(scores: torch.Tensor, num_chosen: int, normalizes: bool) -> Chosen:
    """Chooses K = num_chosen of the experts that scores [T, num_experts] are of, see
    `LayerOps.experts`."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights, experts = scores.softmax(-1, dtype=wide).topk(num_chosen, dim=-1)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Chosen(weights, experts)


def sum_of_chosen(x: torch.Tensor, chosen: Chosen, compute: Compute) -> torch.Tensor:
    """Sums what the experts of each row make of it, by weight, in the order in which they are
    chosen. All shapes follow from those of the arguments.

    Args:
        x: [T, hidden_size].
    """
    num_rows, num_chosen = chosen.experts.shape
    experts, order = chosen.experts.flatten().sort(stable=True)
    products = compute(x[order // num_chosen], experts)
    by_row = torch.empty_like(products).index_copy_(0, order, products)
    weights = chosen.weights.to(x.dtype).unsqueeze(1)
    return (weights @ by_row.view(num_rows, num_chosen, x.shape[1])).squeeze(1)
