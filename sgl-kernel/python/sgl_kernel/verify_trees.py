"""Greedy verification of trees that are given as links, of equal size or packed."""

from __future__ import annotations

import ctypes

import torch

from sgl_kernel import reference_trees
from sgl_kernel._checks import check_device, check_matrix, check_size, check_vector
from sgl_kernel._library import KernelLibrary, library_for
from sgl_kernel._structs import LinkedTrees, PackedVerdict, UniformVerdict
from sgl_kernel.confirmed_drafts import ConfirmedDrafts

MAX_NODES = 1024  # kMostVerifiedNodes of include/sgl_kernel/verify_trees.cuh


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walks from each root to the first child that holds the model's token after the current node,
    until no child does or D - 1 drafts are accepted. R trees of W nodes, node 0 the root.

    Links that do not lead to a later node of the tree end a walk, a row outside of the R * W is
    never accepted, and without the root's nothing is. Nothing waits for the device.

    Args:
        predicts: result, [R * W] int32; the token after each accepted row. Others stay.
        accept_index: result, [R, D] int32; row of the k-th accepted node, root first; -1 after.
        accept_token_num: result, [R] int32; drafts accepted, so without the root.
        candidates: [R, W] int64; token of each node.
        retrive_index: [R, W] int64; row of each node.
        retrive_next_token, retrive_next_sibling: [R, W] int64; first child and next sibling, or -1.
        target_predict: [R, W] int64; the model's own token after each row.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tensors are on a GPU that no kernel can be had for.
    """
    results = (predicts, accept_index, accept_token_num)
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    check_uniform(results, trees)
    device = candidates.device
    shape = (candidates.shape[0], candidates.shape[1])
    check_matrix("target_predict", target_predict, torch.int64, shape, device)
    if candidates.is_cpu:
        reference_trees.verify_tree_greedy(*results, *trees, target_predict)
    elif candidates.shape[0]:
        stream = torch.cuda.current_stream(device).cuda_stream
        launch_uniform(
            library_for(device.index), results, trees, target_predict, device.index, stream
        )


def verify_ragged_trees(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    starts: torch.Tensor,
    max_kept: int,
) -> ConfirmedDrafts:
    """As `verify_tree_greedy`, for packed trees: request i has rows starts[i] to starts[i + 1].

    Of a request the first 1024 rows are its nodes; one without rows keeps nothing. Numbers that
    reach outside of `tokens` are cut off there. Nothing waits for the device.

    Args:
        tokens: [T] int64; what each row feeds.
        targets: [T] int64; the model's own token after each row.
        first_child, next_sibling: [T] int32; nodes of the request, or -1.
        starts: [R + 1] int64, not descending.
        max_kept: M, nodes kept of a request at most, the root is one of them; 1 to 1024.

    Returns:
        Kept nodes in `path` [R, M], and the target after the last of them.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tokens are on a GPU that no kernel can be had for.
    """
    trees = (tokens, first_child, next_sibling, starts)
    check_ragged(trees, max_kept)
    device = tokens.device
    check_vector("targets", targets, torch.int64, tokens.shape[0], device)
    if tokens.is_cpu or starts.shape[0] == 1:
        return reference_trees.verify_ragged_trees(
            tokens, targets, first_child, next_sibling, starts, max_kept
        )
    result = empty_verdict(starts.shape[0] - 1, max_kept, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    launch_ragged(library_for(device.index), result, trees, targets, device.index, stream)
    return result


def launch_uniform(
    library: KernelLibrary,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    targets: torch.Tensor,
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked tensors, in the order of `verify_tree_greedy`; R > 0."""
    linked, verdict = uniform_structs(results, trees)
    status = library.verify_trees(
        *(device, ctypes.byref(linked), targets.data_ptr(), trees[0].shape[0]),
        *(ctypes.byref(verdict), stream),
    )
    library.check(status)


def launch_ragged(
    library: KernelLibrary,
    result: ConfirmedDrafts,
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    targets: torch.Tensor,
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked tensors; trees: tokens, both links, starts; R > 0."""
    linked, verdict = ragged_structs(result, trees)
    status = library.verify_ragged_trees(
        *(device, ctypes.byref(linked), targets.data_ptr(), trees[3].shape[0] - 1),
        *(ctypes.byref(verdict), stream),
    )
    library.check(status)


def uniform_structs(
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[LinkedTrees, UniformVerdict]:
    """Returns the structs that C reads of trees of equal size, and where it writes."""
    tokens, rows, first_child, next_sibling = (tensor.data_ptr() for tensor in trees)
    sizes = (trees[0].numel(), trees[0].shape[1])
    linked = LinkedTrees(tokens, first_child, next_sibling, rows, None, *sizes)
    addresses = (tensor.data_ptr() for tensor in results)
    return linked, UniformVerdict(*addresses, results[1].shape[1])


def ragged_structs(
    result: ConfirmedDrafts,
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[LinkedTrees, PackedVerdict]:
    """Returns the structs that C reads of packed trees, and where it writes."""
    tokens, first_child, next_sibling, starts = (tensor.data_ptr() for tensor in trees)
    linked = LinkedTrees(
        tokens, first_child, next_sibling, None, starts, trees[0].numel(), MAX_NODES
    )
    addresses = (tensor.data_ptr() for tensor in result)
    return linked, PackedVerdict(*addresses, result.path.shape[1])


def empty_verdict(num_requests: int, max_kept: int, device: torch.device) -> ConfirmedDrafts:
    """Memory for what a verification says."""
    return ConfirmedDrafts(
        num_confirmed=torch.empty(num_requests, dtype=torch.int64, device=device),
        path=torch.empty(num_requests, max_kept, dtype=torch.int32, device=device),
        next_token=torch.empty(num_requests, dtype=torch.int64, device=device),
    )


def check_uniform(
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Refuses what the verifications of trees of equal size do not take."""
    predicts, accept_index, accept_token_num = results
    if trees[0].dim() != 2 or accept_index.dim() != 2:
        raise ValueError("candidates and accept_index must be [R, W] and [R, D]; reshape them")
    check_device("candidates", trees[0])
    device, (num_requests, num_nodes) = trees[0].device, trees[0].shape
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"candidates must have 1 to {MAX_NODES} columns, not {num_nodes}")
    if accept_index.shape[1] < 1:
        raise ValueError("accept_index needs at least one column, for the root")
    check_size("candidates", trees[0].numel())
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    for name, tensor in zip(names, trees, strict=True):
        check_matrix(name, tensor, torch.int64, (num_requests, num_nodes), device)
    check_vector("predicts", predicts, torch.int32, num_requests * num_nodes, device)
    shape = (num_requests, accept_index.shape[1])
    check_matrix("accept_index", accept_index, torch.int32, shape, device)
    check_vector("accept_token_num", accept_token_num, torch.int32, num_requests, device)


def check_ragged(
    trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], max_kept: int
) -> None:
    """Refuses what the verifications of packed trees do not take."""
    tokens, first_child, next_sibling, starts = trees
    if tokens.dim() != 1 or starts.dim() != 1 or not starts.shape[0]:
        raise ValueError("tokens and starts must be [T] and [R + 1]; flatten them")
    check_device("tokens", tokens)
    device, num_tokens = tokens.device, tokens.shape[0]
    check_size("tokens", num_tokens)
    check_vector("tokens", tokens, torch.int64, num_tokens, device)
    check_vector("first_child", first_child, torch.int32, num_tokens, device)
    check_vector("next_sibling", next_sibling, torch.int32, num_tokens, device)
    check_vector("starts", starts, torch.int64, starts.shape[0], device)
    if not 1 <= max_kept <= MAX_NODES:
        raise ValueError(f"max_kept must be in 1..{MAX_NODES}, not {max_kept}")
