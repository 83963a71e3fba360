"""The largest possible step. It runs once before the first request, and torch's allocator keeps its
memory, so no later step lacks it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.mem_cache.memory_pool import hand_back_unused

MIN_PROMPT_ROWS = 256  # smaller chunks would use too little of a GPU's speed


def largest_step(
    prompt_rows: int, decode_rows: int, max_requests: int, row_width: int
) -> list[int]:
    """Returns the rows of each request of a step that feeds `prompt_rows` prompt tokens, in as few
    requests as rows of the page table allow, beside `decode_rows` of every other request. No step
    with the same number of prompt tokens has more rows."""
    whole, rest = divmod(prompt_rows, row_width)
    prompts = ([row_width] * whole + [max(rest, decode_rows)] * (rest > 0))[:max_requests]
    return prompts + [decode_rows] * (max_requests - len(prompts))


def most_that_fits(
    run: Callable[[int], object], wished: int, least: int, device: torch.device
) -> int:
    """Returns `wished`, halved until `run` has memory for it on `device`.

    Raises:
        torch.OutOfMemoryError: if there is too little for `least` (or `wished`, if that is less).
    """
    size, least = wished, min(wished, least)
    while size > least:
        if _fits(run, size):
            return size
        # Outside of the handler: the error holds the tensors of the step that failed.
        hand_back_unused(device)
        size = max(size // 2, least)
    run(size)
    return size


def _fits(run: Callable[[int], object], size: int) -> bool:
    try:
        run(size)
    except torch.OutOfMemoryError:
        return False
    return True
