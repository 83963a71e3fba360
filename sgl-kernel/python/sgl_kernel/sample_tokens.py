"""Seeded sampling among the tokens that filters keep, without sorting."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_banned_ids, check_logits, check_vector
from sgl_kernel._library import library_for
from sgl_kernel.sampling_rows import FLOATS, SamplingRows


def sample_tokens(
    logits: torch.Tensor, rows: SamplingRows, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row; the noise depends on (seed, position, token) alone.

    Tokens are ordered by logit, ties by lower index. Each filter looks at the unfiltered
    probabilities, and the best token is always kept. A row's token does not depend on the other
    rows.

    Args:
        logits: [S, V] float32, bfloat16 or float16; any row stride, last stride 1.
        banned_ids: [B] int64; never drawn, as if their logits were -inf.

    Returns:
        token_ids [S] int64, and logprobs [S] float32: of those tokens among all that are not
        banned, at the row's temperature (1 where it is 0). Of a row without a finite logit the
        token is in range and the logprob is unspecified.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the logits are on a GPU that no kernel can be had for.
    """
    check_logits(logits)
    num_rows, device = logits.shape[0], logits.device
    check_banned_ids(banned_ids, device)
    for name, vector in zip(SamplingRows._fields, rows, strict=True):
        dtype = torch.float32 if name in FLOATS else torch.int64
        check_vector(name, vector, dtype, num_rows, device)
    if logits.is_cpu:
        return reference.sample_tokens(logits, rows, banned_ids)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        library = library_for(logits.get_device())
        library.run(library.sample_tokens, logits, banned_ids, rows, (token_ids, logprobs))
    return token_ids, logprobs
