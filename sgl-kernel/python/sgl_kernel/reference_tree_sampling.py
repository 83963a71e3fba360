"""Sampling along draft trees in plain torch."""

from __future__ import annotations

import torch

from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.reference_trees import (
    Trees,
    TreeWalk,
    as_confirmed,
    packed_trees,
    uniform_trees,
    write_uniform,
)


def sample_trees(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    rows: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """As `sgl_kernel.tree_speculative_sampling_target_only`; probs [R * W, V]."""
    if not len(candidates):
        return
    trees = uniform_trees(candidates, rows, first_child, next_sibling)
    thresholds = (threshold_single, threshold_acc)
    walk, next_token = _sample(
        *(trees, (coins.flatten(), final_coins), probs, draft_probs, thresholds),
        accept_index.shape[1],
    )
    write_uniform(predicts, accept_index, accept_token_num, trees, walk, next_token)


def sample_ragged_trees(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    starts: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    probs: torch.Tensor,
    max_kept: int,
    threshold_single: float,
    threshold_acc: float,
) -> ConfirmedDrafts:
    """Arguments and result as `sgl_kernel.sample_ragged_trees`."""
    trees = packed_trees(tokens, first_child, next_sibling, starts)
    if not len(tokens):  # no request has a root
        coins, probs = coins.new_zeros(1), probs.new_zeros(1, 1)
    thresholds = (threshold_single, threshold_acc)
    return as_confirmed(*_sample(trees, (coins, final_coins), probs, None, thresholds, max_kept))


def _sample(
    trees: Trees,
    coins: tuple[torch.Tensor, torch.Tensor],
    probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    thresholds: tuple[float, float],
    most_kept: int,
) -> tuple[TreeWalk, torch.Tensor]:
    """The walk, and the token drawn after its last node."""
    walk, size, device = TreeWalk(trees, most_kept), probs.shape[1], probs.device
    single, acc = (torch.tensor(value, dtype=torch.float32) for value in thresholds)
    mass = torch.zeros(len(walk.requests), dtype=torch.float32, device=device)
    # What the children refused at the current node have used up.
    is_used = torch.zeros(len(walk.requests), size, dtype=torch.bool, device=device)
    while bool(walk.is_walking().any()):
        place = trees.places[walk.requests, walk.last]
        token = walk.of_node(trees.tokens)
        is_usable = walk.is_walking() & (walk.of_node(trees.rows) >= 0)
        is_usable &= (token >= 0) & (token < size)
        token = token.clamp(0, size - 1)
        prob = probs[place, token]
        is_usable &= (prob > 0) & ~is_used[walk.requests, token]
        mass = mass + torch.where(is_usable, prob, 0.0)
        is_taken = is_usable & ((coins[0][place] < mass / acc) | (prob >= single))
        is_refused = is_usable & ~is_taken
        is_used[walk.requests[is_refused], token[is_refused]] = True
        if draft_probs is not None:
            draft_probs[place[is_refused], token[is_refused]] = prob[is_refused]
        mass = torch.where(is_taken, 0.0, mass)
        is_used &= ~is_taken[:, None]
        walk.step(is_taken)
    own = probs[trees.places[walk.requests, walk.last]].double()
    own = torch.where(own > 0, own, 0.0)
    left = torch.where(is_used, 0.0, own)
    left = torch.where(left.sum(1, keepdim=True) > 0, left, own)
    running = left.cumsum(1)
    is_above = (left > 0) & (running > coins[1].double()[:, None] * running[:, -1:])
    numbers = torch.arange(size, device=device)
    last_positive = torch.where(left > 0, numbers, 0).amax(1)
    return walk, torch.where(is_above.any(1), is_above.int().argmax(1), last_positive)
