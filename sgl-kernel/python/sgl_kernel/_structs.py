"""The structs that C functions read from host memory, field by field as in include/sgl_kernel/."""

from __future__ import annotations

import ctypes

import torch

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_INT = ctypes.c_int
_FLOAT = ctypes.c_float


def address(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


class DraftCandidates(ctypes.Structure):
    """build_ragged_trees.cuh."""

    _fields_ = (
        ("tokens", _POINTER),
        ("scores", _POINTER),
        ("parents", _POINTER),
        ("starts", _POINTER),
        ("root_tokens", _POINTER),
        ("num_nodes", _POINTER),
        ("seq_lens", _POINTER),
        ("num_candidates", _LONG),
        ("num_requests", _LONG),
        ("num_rows", _LONG),
    )


class PackedTrees(ctypes.Structure):
    """build_ragged_trees.cuh; the fields of RaggedTrees."""

    _fields_ = (
        ("tokens", _POINTER),
        ("parents", _POINTER),
        ("positions", _POINTER),
        ("ancestors", _POINTER),
        ("first_child", _POINTER),
        ("next_sibling", _POINTER),
        ("starts", _POINTER),
    )


class LinkedTrees(ctypes.Structure):
    """verify_trees.cuh."""

    _fields_ = (
        ("tokens", _POINTER),
        ("first_child", _POINTER),
        ("next_sibling", _POINTER),
        ("rows", _POINTER),
        ("starts", _POINTER),
        ("num_rows", _LONG),
        ("num_nodes", _INT),
    )


class UniformVerdict(ctypes.Structure):
    """verify_trees.cuh."""

    _fields_ = (
        ("predicts", _POINTER),
        ("accept_index", _POINTER),
        ("accept_token_num", _POINTER),
        ("width", _INT),
    )


class PackedVerdict(ctypes.Structure):
    """verify_trees.cuh; the fields of ConfirmedDrafts, and the width of `path`."""

    _fields_ = (
        ("num_confirmed", _POINTER),
        ("path", _POINTER),
        ("next_token", _POINTER),
        ("width", _INT),
    )


class TreeCoins(ctypes.Structure):
    """sample_trees.cuh."""

    _fields_ = (
        ("coins", _POINTER),
        ("final_coins", _POINTER),
        ("probs", _POINTER),
        ("rejected_probs", _POINTER),
        ("size", _INT),
        ("threshold_single", _FLOAT),
        ("threshold_acc", _FLOAT),
    )
