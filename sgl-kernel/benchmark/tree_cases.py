"""Inputs of the benchmarks of draft trees: EAGLE's candidates with falling scores."""

from __future__ import annotations

from typing import NamedTuple

import torch

TOPK, DEPTH = 8, 6


class DraftedTrees(NamedTuple):
    """R requests with the candidates of DEPTH levels of TOPK parents each.

    Attributes:
        flat: the tensors of build_ragged_trees; all trees have `num_nodes` nodes.
        uniform: parent_list, selected_index and verified_seq_len of build_tree_kernel_efficient.
    """

    flat: tuple[torch.Tensor, ...]
    uniform: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drafted_trees(requests: int, num_nodes: int) -> DraftedTrees:
    """The k-th child of every parent is half as likely as the one before it."""
    halves = 0.5 ** torch.arange(1, TOPK + 1, dtype=torch.float32)
    scores, parents, parent_list = [halves], [torch.full((TOPK,), -1)], [torch.tensor([-1])]
    beam, first = torch.arange(TOPK), TOPK
    for _ in range(1, DEPTH):
        parent_list.append(beam)
        level = (torch.cat(scores)[beam][:, None] * halves).flatten()
        scores.append(level)
        parents.append(beam.repeat_interleave(TOPK))
        beam = first + level.sort(descending=True, stable=True).indices[:TOPK].sort().values
        first += TOPK * TOPK
    score = torch.cat(scores)
    size = len(score)
    chosen = score.sort(descending=True, stable=True).indices[: num_nodes - 1].sort().values
    lengths = torch.full((requests,), 500)
    flat = (
        torch.arange(size).repeat(requests),
        score.repeat(requests),
        torch.cat(parents).to(torch.int32).repeat(requests),
        torch.arange(requests + 1) * size,
        torch.zeros(requests, dtype=torch.int64),
        torch.full((requests,), num_nodes),
        lengths,
    )
    uniform = (torch.cat(parent_list).repeat(requests, 1), chosen.repeat(requests, 1), lengths)
    return DraftedTrees(
        tuple(tensor.cuda() for tensor in flat),
        tuple(tensor.cuda() for tensor in uniform),
    )
