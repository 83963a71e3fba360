"""The best tokens of each row and their log-probabilities, in one pass over the logits."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_banned_ids, check_logits, check_topk
from sgl_kernel._library import library_for

MOST_TOP = 16  # that the kernels find; include/sgl_kernel/topk_logprob.cuh has the same
_SUM_BYTES, _TOKEN_BYTES = 16, 8  # of a chunk in the workspace: its sum, and each of its best


def topk_logprob(
    logits: torch.Tensor, topk: int, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K best tokens of each row and their log-probabilities, the best first.

    Banned ids count as -inf; ids outside the vocabulary ban nothing. Of equal logits the lower
    index comes first. With NaN among a row's logits its ids are still in range; its other results
    are unspecified. A row's results do not depend on the other rows. More than 16 tokens are found
    by torch, which takes longer.

    Args:
        logits: [S, V] float32, bfloat16 or float16; any row stride, last stride 1.
        topk: K, 1 to V.
        banned_ids: [B] int64; a handful.

    Returns:
        token_ids [S, K] int64, logprobs [S, K] float32.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the logits are on a GPU that no kernel can be had for.
    """
    check_logits(logits)
    check_topk(topk, logits.shape[1])
    check_banned_ids(banned_ids, logits.device)
    if logits.is_cpu or topk > MOST_TOP:
        return reference.topk_logprob(logits, topk, banned_ids)
    rows, device = logits.shape[0], logits.device
    token_ids = torch.empty((rows, topk), dtype=torch.int64, device=device)
    logprobs = torch.empty((rows, topk), dtype=torch.float32, device=device)
    if rows:
        library = library_for(logits.get_device())
        library.run(
            library.topk_logprob, logits, banned_ids, (), (token_ids, logprobs),
            (topk,), _SUM_BYTES + _TOKEN_BYTES * topk,
        )  # fmt: skip
    return token_ids, logprobs
