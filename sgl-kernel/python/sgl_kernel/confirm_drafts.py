"""Verification of drafts, in chains and trees of any shape, for all requests of a step at once."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_device, check_vector
from sgl_kernel._library import library_for
from sgl_kernel.confirmed_drafts import ConfirmedDrafts

MAX_ROWS = 1024  # kMostPendingRows of include/sgl_kernel/confirm_drafts.cuh


def confirm_drafts(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    parents: torch.Tensor | None,
    starts: torch.Tensor,
    num_rows: torch.Tensor,
    max_rows: int,
    target_starts: torch.Tensor | None = None,
) -> ConfirmedDrafts:
    """Finds which drafts the model's own tokens confirm: from row 0 on, always the row that follows
    the current one and holds its target, the lowest if several do, until there is none.

    The rows of a step are packed: request i has rows starts[i] to starts[i + 1], and the first
    num_rows[i] of them are pending, row 0 with a certain token, the others with a draft each. What
    lies after them (masks, padding) is ignored, and so is a request without pending rows. Numbers
    that reach outside of the request, of `tokens`, of `targets` or of `max_rows` are cut off there.
    Nothing waits for the device.

    Args:
        tokens: [S] int64; what each packed row feeds.
        targets: [T] int64; the model's own token after each row that was read.
        parents: [S] int32; index within the request of the row that a row follows, less than its
            own; a draft with any other is never confirmed. None: each row follows the one before.
        starts: [R + 1] int64, not descending.
        num_rows: [R] int64; pending rows.
        max_rows: M, at least the pending rows of any request; 1 to 1024.
        target_starts: [R] int64; where the targets of a request's rows begin, for steps that read
            some rows alone. None: `targets` has the packed rows, T = S.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the tokens are on a GPU that no kernel can be had for.
    """
    _check(tokens, targets, parents, starts, num_rows, target_starts)
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows must be in 1..{MAX_ROWS}, not {max_rows}; draft fewer tokens")
    if tokens.is_cpu:
        return reference.confirm_drafts(
            tokens, targets, parents, starts, num_rows, max_rows, target_starts
        )
    device, num_requests = tokens.device, num_rows.shape[0]
    result = ConfirmedDrafts(
        num_confirmed=torch.empty(num_requests, dtype=torch.int64, device=device),
        path=torch.empty(num_requests, max_rows, dtype=torch.int32, device=device),
        next_token=torch.empty(num_requests, dtype=torch.int64, device=device),
    )
    if num_requests:
        library = library_for(tokens.get_device())
        arguments = (tokens, targets, parents, starts, target_starts, num_rows)
        status = library.confirm_drafts(
            tokens.get_device(),
            *(None if tensor is None else tensor.data_ptr() for tensor in arguments),
            *(tokens.shape[0], targets.shape[0], num_requests, max_rows),
            *(tensor.data_ptr() for tensor in result),
            torch.cuda.current_stream(device).cuda_stream,
        )
        library.check(status)
    return result


def _check(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    parents: torch.Tensor | None,
    starts: torch.Tensor,
    num_rows: torch.Tensor,
    target_starts: torch.Tensor | None,
) -> None:
    """Refuses tensors that `confirm_drafts` does not take."""
    if tokens.dim() != 1 or targets.dim() != 1 or num_rows.dim() != 1:
        raise ValueError("tokens, targets and num_rows must be [S], [T] and [R]; flatten them")
    check_device("tokens", tokens)
    device, num_tokens, num_requests = tokens.device, tokens.shape[0], num_rows.shape[0]
    check_vector("tokens", tokens, torch.int64, num_tokens, device)
    num_targets = num_tokens if target_starts is None else targets.shape[0]
    check_vector("targets", targets, torch.int64, num_targets, device)
    if parents is not None:
        check_vector("parents", parents, torch.int32, num_tokens, device)
    check_vector("starts", starts, torch.int64, num_requests + 1, device)
    check_vector("num_rows", num_rows, torch.int64, num_requests, device)
    if target_starts is not None:
        check_vector("target_starts", target_starts, torch.int64, num_requests, device)
