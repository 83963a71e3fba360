"""Trees of equal size, in the layout that SGLang's EAGLE workers use."""

from __future__ import annotations

import torch

from sgl_kernel import reference_trees
from sgl_kernel._checks import check_device, check_matrix, check_size, check_vector
from sgl_kernel._library import KernelLibrary, library_for
from sgl_kernel.tree_mask_mode import TreeMaskMode, packed_row_bytes

MAX_NODES = 1024  # kMostUniformNodes of include/sgl_kernel/build_tree.cuh
MAX_PACKED_NODES = 32


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> None:
    """Writes positions, links and masks of R trees of W = draft_token_num nodes, node 0 the root.

    A request's candidates are numbered: 0 to topk - 1 follow the root; those of each later level
    are topk blocks of topk, the k-th of them the children of that level's k-th parent. So the
    parent of candidate c is parent_list[c // topk], or the root where c < topk.

    All results are written whole, but for the prefix columns of FULL_MASK. A node whose parent is
    not among the nodes before it, and every node after such a one, is not linked to anything: it
    is at depth 1 and sees itself and the root. A request whose FULL_MASK would reach outside of
    `tree_mask` gets none. Nothing waits for the device.

    Args:
        parent_list: [R, topk * (depth - 1) + 1] int64, or [R, 0] where depth is 1; first -1, then
            the candidates that were expanded, level by level.
        selected_index: [R, W - 1] int64; the candidates of the nodes from 1 on, ascending.
        verified_seq_len: [R] int64; L, position of each root.
        tree_mask: result; as `tree_mask_mode` says, flat or in any shape.
        positions: result, [R * W] int64; L + depth of the node.
        retrive_index: result, [R, W] int64; row of the node among all requests' rows.
        retrive_next_token: result, [R, W] int64; the first child, or -1.
        retrive_next_sibling: result, [R, W] int64; the next sibling, or -1.
        topk: children of each candidate that is expanded.
        depth: steps of the draft model.
        draft_token_num: W, 1 to 1024; with QLEN_ONLY_BITPACKING up to 32.
        tree_mask_mode: a TreeMaskMode.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tensors are on a GPU that no kernel can be had for.
    """
    mode = TreeMaskMode(tree_mask_mode)
    if topk < 1 or depth < 1:
        raise ValueError(f"topk and depth must be at least 1, not {topk} and {depth}")
    _check_inputs(parent_list, selected_index, verified_seq_len, topk, depth, draft_token_num)
    inputs = (parent_list, selected_index, verified_seq_len)
    results = (tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    _check_results(results, mode, verified_seq_len.shape[0], draft_token_num, parent_list.device)
    if parent_list.is_cpu:
        reference_trees.build_tree(*inputs, *results, topk, mode)
    elif positions.numel():
        device = parent_list.device
        stream = torch.cuda.current_stream(device).cuda_stream
        launch(library_for(device.index), inputs, results, topk, mode, device.index, stream)


def launch(
    library: KernelLibrary,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, ...],
    topk: int,
    mode: TreeMaskMode,
    device: int,
    stream: int | None,
) -> None:
    """Runs the kernel on checked arguments, in the order of the op; R > 0."""
    num_requests, num_nodes = results[2].shape
    status = library.build_tree(
        *(device, *(tensor.data_ptr() for tensor in inputs)),
        *(inputs[0].shape[1], topk, num_nodes, num_requests),
        *(results[0].data_ptr(), results[0].numel(), int(mode)),
        *(tensor.data_ptr() for tensor in results[1:]),
        stream,
    )
    library.check(status)


def _check_inputs(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
) -> None:
    check_device("parent_list", parent_list)
    if verified_seq_len.dim() != 1:
        raise ValueError("verified_seq_len must be [R]; flatten it")
    num_requests, device = verified_seq_len.shape[0], parent_list.device
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"draft_token_num must be in 1..{MAX_NODES}, not {num_nodes}")
    check_size("the rows of all requests", num_requests * num_nodes)
    width = 0 if depth == 1 and parent_list.numel() == 0 else topk * (depth - 1) + 1
    check_matrix("parent_list", parent_list, torch.int64, (num_requests, width), device)
    shape = (num_requests, num_nodes - 1)
    check_matrix("selected_index", selected_index, torch.int64, shape, device)
    check_vector("verified_seq_len", verified_seq_len, torch.int64, num_requests, device)


def _check_results(
    results: tuple[torch.Tensor, ...],
    mode: TreeMaskMode,
    num_requests: int,
    num_nodes: int,
    device: torch.device,
) -> None:
    _check_mask(results[0], mode, num_requests, num_nodes, device)
    check_vector("positions", results[1], torch.int64, num_requests * num_nodes, device)
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    for name, links in zip(names, results[2:], strict=True):
        check_matrix(name, links, torch.int64, (num_requests, num_nodes), device)


def _check_mask(
    mask: torch.Tensor, mode: TreeMaskMode, num_requests: int, num_nodes: int, device: torch.device
) -> None:
    is_packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    if is_packed and num_nodes > MAX_PACKED_NODES:
        raise ValueError(
            f"QLEN_ONLY_BITPACKING takes up to {MAX_PACKED_NODES} nodes, not {num_nodes}; "
            "use QLEN_ONLY"
        )
    dtype = torch.uint8 if is_packed else torch.bool
    row_size = packed_row_bytes(num_nodes) if is_packed else num_nodes
    size = num_requests * num_nodes * row_size
    if mode == TreeMaskMode.FULL_MASK and mask.numel() > size:
        size = mask.numel()  # the prefixes, whose lengths only the device knows
    check_vector("tree_mask", mask.flatten(), dtype, size, device)
    if not mask.is_contiguous():
        raise ValueError("tree_mask must be contiguous; call tree_mask.contiguous()")
