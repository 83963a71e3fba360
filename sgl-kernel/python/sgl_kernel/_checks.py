"""Validation of the ops' arguments; every message names the remedy."""

from __future__ import annotations

import torch

from sgl_kernel._library import DTYPE_CODES

_MAX_ROWS = 2**31 - 33


def check_logits(logits: torch.Tensor) -> None:
    """Refuses what is not [S, V] float32, bfloat16 or float16 with adjacent columns."""
    if logits.dim() != 2:
        raise ValueError(f"logits must be [S, V], not {list(logits.shape)}; reshape them")
    if logits.dtype not in DTYPE_CODES:
        raise ValueError(
            f"logits must be float32, bfloat16 or float16, not {logits.dtype}; convert them"
        )
    if logits.shape[1] == 0:
        raise ValueError("logits need at least one column (V >= 1); pass the whole vocabulary")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError("the last stride of logits must be 1; call logits.contiguous()")
    check_device("logits", logits)


def check_topk(topk: int, size: int) -> None:
    """Refuses to find no tokens, or more than there are."""
    if not 1 <= topk <= size:
        raise ValueError(f"topk must be from 1 to {size}, the vocabulary's size, not {topk}")


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Refuses what is neither on a CUDA device nor on the CPU."""
    if not (tensor.is_cuda or tensor.is_cpu):
        raise ValueError(f"{name} is on {tensor.device}; move it to a CUDA device or to the CPU")


def check_size(name: str, size: int) -> None:
    """Refuses what the kernels' 32-bit rows cannot count."""
    if size > _MAX_ROWS:
        raise ValueError(f"{name} must be at most {_MAX_ROWS}, not {size}; split the call")


def check_banned_ids(banned_ids: torch.Tensor | None, device: torch.device) -> None:
    """Refuses what is not None or a contiguous [B] int64 on `device`."""
    if banned_ids is None:
        return
    if banned_ids.dim() != 1:
        raise ValueError(f"banned_ids must be [B], not {list(banned_ids.shape)}; flatten them")
    check_vector("banned_ids", banned_ids, torch.int64, banned_ids.shape[0], device)


def check_vector(
    name: str, vector: torch.Tensor, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    """Refuses what is not a contiguous [size] tensor of `dtype` on `device`."""
    if vector.dim() != 1 or vector.shape[0] != size:
        raise ValueError(f"{name} must be [{size}], one entry per row, not {list(vector.shape)}")
    _check_memory(name, vector, dtype, device)


def check_matrix(
    name: str,
    matrix: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Refuses what is not a contiguous tensor of `shape` and `dtype` on `device`."""
    if tuple(matrix.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(matrix.shape)}")
    _check_memory(name, matrix, dtype, device)


def _check_memory(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype}, not {tensor.dtype}; convert it with .to({dtype})"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; call {name}.contiguous()")
