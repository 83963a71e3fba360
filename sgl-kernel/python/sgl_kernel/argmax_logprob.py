"""The best token of each row and the normalizer of its softmax, in one pass over the logits."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_banned_ids, check_logits
from sgl_kernel._library import library_for


def argmax(logits: torch.Tensor, banned_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The token_ids of `argmax_logprob` alone; on a GPU the rest costs nothing, on a CPU it does.

    Arguments and errors as there.
    """
    if logits.is_cpu:
        check_logits(logits)
        check_banned_ids(banned_ids, logits.device)
        return reference.argmax(logits, banned_ids)
    return argmax_logprob(logits, banned_ids)[0]


def argmax_logprob(
    logits: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best token, its logit and its log-probability, of each row.

    Banned ids count as -inf; ids outside the vocabulary ban nothing. Ties go to the lowest index.
    With NaN among a row's logits its id is still in range; its other results are unspecified. A
    row's results do not depend on the other rows.

    Args:
        logits: [S, V] float32, bfloat16 or float16; any row stride, last stride 1.
        banned_ids: [B] int64; a handful.

    Returns:
        token_ids [S] int64, best [S] float32, logprobs [S] float32.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the logits are on a GPU that no kernel can be had for.
    """
    check_logits(logits)
    check_banned_ids(banned_ids, logits.device)
    if logits.is_cpu:
        return reference.argmax_logprob(logits, banned_ids)
    rows, device = logits.shape[0], logits.device
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    best = torch.empty(rows, dtype=torch.float32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        library = library_for(logits.get_device())
        results = (token_ids, best, logprobs)
        library.run(library.argmax_logprob, logits, banned_ids, (), results)
    return token_ids, best, logprobs
