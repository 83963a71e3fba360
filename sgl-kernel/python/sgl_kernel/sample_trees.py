"""Verification of trees by sampling, so that the tokens follow the model's own distribution."""

from __future__ import annotations

import ctypes

import torch

from sgl_kernel import reference_tree_sampling
from sgl_kernel._checks import check_matrix, check_vector
from sgl_kernel._library import KernelLibrary, library_for
from sgl_kernel._structs import TreeCoins, address
from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.verify_trees import (
    check_ragged,
    check_uniform,
    empty_verdict,
    ragged_structs,
    uniform_structs,
)

MAX_VOCABULARY = 1 << 20  # kMostSampledTokens of include/sgl_kernel/sample_trees.cuh
_SMALLEST_THRESHOLD_ACC = 1e-9


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accepts drafts along each tree by one coin per node, and draws the token after the last.

    At a node the probabilities of its children are added one after the other. The first child is
    taken whose own probability is above 0 and for which coin < sum / threshold_acc or probability
    >= threshold_single; then its own coin decides among its children. Where no child is taken, the
    token after the node is drawn from the distribution without the children's tokens (should they
    hold all of it: with them), and from all of it after D - 1 accepted drafts. With both thresholds
    at 1 the tokens follow `target_probs` exactly, whatever was drafted. A token that an earlier
    sibling held too is not taken.

    Links and rows: as `verify_tree_greedy`. Equal inputs give equal outputs. Nothing waits for the
    device.

    Args:
        predicts, accept_index, accept_token_num: results, as of `verify_tree_greedy`.
        candidates, retrive_index, retrive_next_token, retrive_next_sibling: [R, W] int64.
        uniform_samples: [R, W] float32 in [0, 1); a node's coin.
        uniform_samples_for_final_sampling: [R] float32 in [0, 1).
        target_probs: [R, W, V] float32; of the token after each node, after temperature and
            filters. What is not above 0, NaN too, is never drawn. V is at most 2^20.
        draft_probs: [R, W, V] float32, or None; the probability of each refused child is written at
            its token in its parent's row. Nothing reads it.
        threshold_single, threshold_acc: 0 to 1; less accepts more and is no longer exact.
        deterministic: only for callers of SGLang's op; the result never varies.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tensors are on a GPU that no kernel can be had for.
    """
    results = (predicts, accept_index, accept_token_num)
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    check_uniform(results, trees)
    coins = (uniform_samples, uniform_samples_for_final_sampling)
    _check_uniform_coins(candidates, coins, target_probs, draft_probs)
    device, num_rows = candidates.device, candidates.numel()
    scratch = None if draft_probs is None else draft_probs.flatten(0, 1)
    probs = (target_probs.flatten(0, 1), scratch)
    thresholds = _checked_thresholds(threshold_single, threshold_acc)
    if candidates.is_cpu:
        reference_tree_sampling.sample_trees(*results, *trees, *coins, *probs, *thresholds)
    elif num_rows:
        stream = torch.cuda.current_stream(device).cuda_stream
        library = library_for(device.index)
        launch_uniform(library, results, trees, coins, probs, thresholds, device.index, stream)


def sample_ragged_trees(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    starts: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    probs: torch.Tensor,
    max_kept: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> ConfirmedDrafts:
    """As `tree_speculative_sampling_target_only`, for packed trees and without its scratch.

    Args:
        tokens, first_child, next_sibling, starts, max_kept: as of `verify_ragged_trees`.
        coins: [T] float32 in [0, 1); a row's coin.
        final_coins: [R] float32 in [0, 1).
        probs: [T, V] float32; of the token after each row. V is at most 2^20.

    Returns:
        Kept nodes in `path` [R, max_kept], and the token drawn after the last of them.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tokens are on a GPU that no kernel can be had for.
    """
    trees = (tokens, first_child, next_sibling, starts)
    check_ragged(trees, max_kept)
    device, num_requests = tokens.device, starts.shape[0] - 1
    check_vector("coins", coins, torch.float32, tokens.shape[0], device)
    check_vector("final_coins", final_coins, torch.float32, num_requests, device)
    if probs.dim() != 2:
        raise ValueError(f"probs must be [T, V], not {list(probs.shape)}")
    _check_probs("probs", probs, (tokens.shape[0], probs.shape[1]), device)
    thresholds = _checked_thresholds(threshold_single, threshold_acc)
    if tokens.is_cpu or not num_requests:
        return reference_tree_sampling.sample_ragged_trees(
            *trees, coins, final_coins, probs, max_kept, *thresholds
        )
    result = empty_verdict(num_requests, max_kept, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    launch_ragged(
        *(library_for(device.index), result, trees, (coins, final_coins)),
        *(probs, thresholds, device.index, stream),
    )
    return result


def launch_uniform(
    library: KernelLibrary,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    coins: tuple[torch.Tensor, torch.Tensor],
    probs: tuple[torch.Tensor, torch.Tensor | None],
    thresholds: tuple[float, float],
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked tensors; probs: of target and draft, [R * W, V]; R > 0."""
    linked, verdict = uniform_structs(results, trees)
    sampling = _coin_struct(coins, probs, thresholds)
    structs = (ctypes.byref(linked), ctypes.byref(sampling))
    status = library.sample_trees(
        *(device, *structs, trees[0].shape[0], ctypes.byref(verdict), stream)
    )
    library.check(status)


def launch_ragged(
    library: KernelLibrary,
    result: ConfirmedDrafts,
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    coins: tuple[torch.Tensor, torch.Tensor],
    probs: torch.Tensor,
    thresholds: tuple[float, float],
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked tensors; R > 0."""
    linked, verdict = ragged_structs(result, trees)
    sampling = _coin_struct(coins, (probs, None), thresholds)
    structs = (ctypes.byref(linked), ctypes.byref(sampling))
    status = library.sample_ragged_trees(
        *(device, *structs, trees[3].shape[0] - 1, ctypes.byref(verdict), stream)
    )
    library.check(status)


def _check_uniform_coins(
    candidates: torch.Tensor,
    coins: tuple[torch.Tensor, torch.Tensor],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> None:
    device, (num_requests, num_nodes) = candidates.device, candidates.shape
    shape = (num_requests, num_nodes)
    check_matrix("uniform_samples", coins[0], torch.float32, shape, device)
    name = "uniform_samples_for_final_sampling"
    check_vector(name, coins[1], torch.float32, num_requests, device)
    if target_probs.dim() != 3:
        raise ValueError(f"target_probs must be [R, W, V], not {list(target_probs.shape)}")
    size = target_probs.shape[2]
    _check_probs("target_probs", target_probs, (*shape, size), device)
    if draft_probs is not None:
        _check_probs("draft_probs", draft_probs, (*shape, size), device)


def _coin_struct(
    coins: tuple[torch.Tensor, torch.Tensor],
    probs: tuple[torch.Tensor, torch.Tensor | None],
    thresholds: tuple[float, float],
) -> TreeCoins:
    addresses = (address(tensor) for tensor in (*coins, *probs))
    return TreeCoins(*addresses, probs[0].shape[1], *thresholds)


def _checked_thresholds(single: float, acc: float) -> tuple[float, float]:
    if not (0 <= single <= 1 and 0 <= acc <= 1):
        raise ValueError(f"thresholds must be in 0..1, not {single} and {acc}")
    return single, max(acc, _SMALLEST_THRESHOLD_ACC)


def _check_probs(
    name: str, probs: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    if not 1 <= shape[-1] <= MAX_VOCABULARY:
        raise ValueError(f"{name} must have 1 to {MAX_VOCABULARY} columns, not {shape[-1]}")
    check_matrix(name, probs, torch.float32, shape, device)
