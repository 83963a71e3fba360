"""Trees of different sizes in one launch, in the layout that this runtime's steps use."""

from __future__ import annotations

import ctypes

import torch

from sgl_kernel import reference_trees
from sgl_kernel._checks import check_device, check_size, check_vector
from sgl_kernel._library import KernelLibrary, library_for
from sgl_kernel._structs import DraftCandidates, PackedTrees
from sgl_kernel.ragged_trees import RaggedTrees


def build_ragged_trees(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    root_tokens: torch.Tensor,
    num_nodes: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
) -> RaggedTrees:
    """Keeps the best candidates of each of R requests and packs the trees that they make.

    Request i has candidates starts[i] to starts[i + 1], numbered from 0. Its tree has
    num_nodes[i] rows, but no more than 64 or than the root and all candidates, and none where
    num_nodes[i] is below 1. The kept candidates are those with the greatest scores, of equal ones
    the first; they become the nodes from 1 on in the order of their numbers. A score that is not
    above 0, NaN too, counts as 0. Scores are to fall, or stay, from a parent to its children (as
    probabilities of paths do): then a candidate is kept only if its parent is. A node whose parent
    is not a node before it, and every node after such a one, is not linked to anything: it is at
    depth 1, has no parent and sees itself and the root.

    Rows that do not fit into num_rows are left out, the last requests' first. Numbers that reach
    outside of the candidates are cut off there. Nothing waits for the device.

    Args:
        tokens: [C] int64; of each candidate.
        scores: [C] float32; probability of the path from the root to it.
        parents: [C] int32; the candidate of the request that it follows, less than its own number;
            -1: the root.
        starts: [R + 1] int64, not descending.
        root_tokens: [R] int64.
        num_nodes: [R] int64; rows wanted, the root is one of them.
        seq_lens: [R] int64; position of each root.
        num_rows: T, rows of the result, 0 or more.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tokens are on a GPU that no kernel can be had for.
    """
    arguments = (tokens, scores, parents, starts, root_tokens, num_nodes, seq_lens)
    _check(*arguments)
    if num_rows < 0:
        raise ValueError(f"num_rows must be at least 0, not {num_rows}")
    check_size("num_rows", num_rows)
    if tokens.is_cpu or not root_tokens.shape[0]:
        return reference_trees.build_ragged_trees(*arguments, num_rows)
    device = tokens.device
    results = empty_results(root_tokens.shape[0], num_rows, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    launch(library_for(device.index), arguments, results, device.index, stream)
    return results


def empty_results(num_requests: int, num_rows: int, device: torch.device) -> RaggedTrees:
    """Memory for the trees."""
    longs = [torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3)]
    ints = [torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(3)]
    return RaggedTrees(
        tokens=longs[0],
        parents=ints[0],
        positions=longs[1],
        ancestors=longs[2],
        first_child=ints[1],
        next_sibling=ints[2],
        starts=torch.empty(num_requests + 1, dtype=torch.int64, device=device),
    )


def launch(
    library: KernelLibrary,
    arguments: tuple[torch.Tensor, ...],
    results: RaggedTrees,
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked tensors, in the order of the op; R > 0."""
    tokens, root_tokens = arguments[0], arguments[4]
    addresses = (tensor.data_ptr() for tensor in arguments)
    sizes = (tokens.shape[0], root_tokens.shape[0], results.tokens.shape[0])
    drafts = DraftCandidates(*addresses, *sizes)
    built = PackedTrees(*(tensor.data_ptr() for tensor in results))
    status = library.build_ragged_trees(device, ctypes.byref(drafts), ctypes.byref(built), stream)
    library.check(status)


def _check(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    root_tokens: torch.Tensor,
    num_nodes: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    if tokens.dim() != 1 or root_tokens.dim() != 1:
        raise ValueError("tokens and root_tokens must be [C] and [R]; flatten them")
    check_device("tokens", tokens)
    device, num_candidates, num_requests = tokens.device, len(tokens), len(root_tokens)
    check_size("tokens", num_candidates)
    check_vector("tokens", tokens, torch.int64, num_candidates, device)
    check_vector("scores", scores, torch.float32, num_candidates, device)
    check_vector("parents", parents, torch.int32, num_candidates, device)
    check_vector("starts", starts, torch.int64, num_requests + 1, device)
    check_vector("root_tokens", root_tokens, torch.int64, num_requests, device)
    check_vector("num_nodes", num_nodes, torch.int64, num_requests, device)
    check_vector("seq_lens", seq_lens, torch.int64, num_requests, device)
