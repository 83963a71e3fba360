"""Repetition, frequency and presence penalties in one pass over the logits."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_logits, check_matrix, check_vector
from sgl_kernel._library import DTYPE_CODES, library_for


def penalize_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    requests: torch.Tensor,
    extra_tokens: torch.Tensor | None = None,
    extra_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits after the penalties of each row's request, for tokens that it has generated.

    A token generated n > 0 times gets its logit divided by the repetition penalty if it is
    positive, else multiplied by it, then lowered by n * frequency + presence.

    Args:
        logits: [S, V] float32, bfloat16 or float16; any row stride, last stride 1.
        counts: [N, V] int32; how often each request has generated each token.
        penalties: [N, 3] float32; repetition, frequency, presence.
        requests: [S] int64; in 0..N-1, not checked.
        extra_tokens: [S, E] int64; tokens that count as generated for one row alone.
        extra_counts: [S, E] int32; how often each of them counts.

    Returns:
        [S, V] float32.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the logits are on a GPU that no kernel can be had for.
    """
    check_logits(logits)
    (rows, size), device = logits.shape, logits.device
    check_matrix("counts", counts, torch.int32, (counts.shape[0], size), device)
    check_matrix("penalties", penalties, torch.float32, (counts.shape[0], 3), device)
    check_vector("requests", requests, torch.int64, rows, device)
    if (extra_tokens is None) != (extra_counts is None):
        raise ValueError("extra_tokens and extra_counts come together; give both or none.")
    num_extra = 0
    if extra_tokens is not None and extra_counts is not None:
        num_extra = extra_tokens.shape[-1]
        check_matrix("extra_tokens", extra_tokens, torch.int64, (rows, num_extra), device)
        check_matrix("extra_counts", extra_counts, torch.int32, (rows, num_extra), device)
    if logits.is_cpu:
        return reference.penalize_logits(
            logits, counts, penalties, requests, extra_tokens, extra_counts
        )
    result = torch.empty((rows, size), dtype=torch.float32, device=device)
    if rows:
        extras = (extra_tokens, extra_counts)
        library = library_for(logits.get_device())
        status = library.penalize_logits(
            *(logits.get_device(), DTYPE_CODES[logits.dtype]),
            *(logits.data_ptr(), logits.stride(0), rows, size),
            *(tensor.data_ptr() for tensor in (counts, penalties, requests)),
            *(None if tensor is None else tensor.data_ptr() for tensor in extras),
            *(num_extra, result.data_ptr(), torch.cuda.current_stream(device).cuda_stream),
        )
        library.check(status)
    return result
