"""Rows of the steps that are measured at start-up."""

from __future__ import annotations

from sglang.srt.layers.forward_batch import MIXED, GraphKey


def rows_of(key: GraphKey, row_width: int) -> list[int]:
    """Rows of the requests of a step that replays this graph and fills it, as far as requests of up
    to `row_width` rows can."""
    if key.is_uniform:
        return [key.width] * key.num_reqs
    if key.tag != MIXED:
        return split(key.num_tokens, key.num_reqs)
    # As few prompts as possible, too long for the other graphs, beside as many decodes as there is
    # room for.
    num_prompts = -(-(key.num_tokens - key.num_reqs) // max(row_width - 1, 1))
    num_prompts = min(max(num_prompts, 1), key.num_reqs)
    others = key.num_tokens - num_prompts * (key.width + 1)
    others = max(0, min(key.num_reqs - num_prompts, others))
    num_rows = min(key.num_tokens - others, num_prompts * row_width)
    return [*split(num_rows, num_prompts), *[1] * others]


def split(num_rows: int, num_reqs: int) -> list[int]:
    """Rows of requests that feed nearly the same."""
    share, rest = divmod(num_rows, num_reqs)
    return [share + (index < rest) for index in range(num_reqs)]
