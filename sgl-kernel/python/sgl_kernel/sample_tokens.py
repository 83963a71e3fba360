"""Seeded sampling with top-k, top-p and min-p, without sorting."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_banned_ids, check_logits, check_vector
from sgl_kernel._library import library_for


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    banned_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row; the noise depends on (seed, position, token) alone.

    Tokens are ordered by logit, ties by lower index. Top-k keeps the k first, top-p those whose
    mass before them is below top_p (all from 1 up), min-p those with at least min_p times the best
    probability; each looks at the unfiltered probabilities, and the best token is always kept. A
    row's token does not depend on the other rows.

    Args:
        logits: [S, V] float32, bfloat16 or float16; any row stride, last stride 1.
        temperature: [S] float32; rows that hold 0 take the best token.
        top_k: [S] int64; V or more keeps all.
        top_p, min_p: [S] float32.
        seeds, positions: [S] int64.
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
    rows = logits.shape[0]
    device = logits.device
    check_banned_ids(banned_ids, device)
    check_vector("temperature", temperature, torch.float32, rows, device)
    check_vector("top_k", top_k, torch.int64, rows, device)
    check_vector("top_p", top_p, torch.float32, rows, device)
    check_vector("min_p", min_p, torch.float32, rows, device)
    check_vector("seeds", seeds, torch.int64, rows, device)
    check_vector("positions", positions, torch.int64, rows, device)
    if logits.is_cpu:
        return reference.sample_tokens(
            logits, temperature, top_k, top_p, min_p, seeds, positions, banned_ids
        )
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        library = library_for(logits.get_device())
        parameters = (temperature, top_k, top_p, min_p, seeds, positions)
        library.run(library.sample_tokens, logits, banned_ids, parameters, (token_ids, logprobs))
    return token_ids, logprobs
