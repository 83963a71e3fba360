"""What a drafter's model is fed behind a step whose drafts were trees: the confirmed paths, which
have been moved to the front by then."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.step_ops import NUM_PROMPT, Q_LEN, Q_START


def rows_of_paths(
    step: ComputedStep, page_table: torch.Tensor, hidden: torch.Tensor
) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
    """The rows of a step that its requests may have kept, each request's side by side and without
    branches: all rows of a prompt, and of other requests the certain token and the confirmed path.
    Where a path is shorter than it may be, rows follow that lie behind the watermark and mean
    nothing. Of a packed step each request has as many rows as if it had verified its whole tree,
    since only the device knows how many it did. Nothing here waits for the device.

    Args:
        step: of trees.
        page_table: [rows, width] int32.
        hidden: [T, width]; of each row of the step.

    Returns:
        The batch, with the tokens of other rows, and with the hidden states of these; where the
        rows of each request begin and where they end, [R] int64.
    """
    inputs, layout, path = step.inputs, step.chosen.layout, step.accepted.path
    assert path is not None, "A step with trees confirms paths."
    per_request, most = layout.per_request, step.plan.max_accepted
    starts, q_lens, is_prompt = (per_request[name] for name in (Q_START, Q_LEN, NUM_PROMPT))
    is_prompt = is_prompt > 0
    fed = [
        num_prompt or min(count, most)
        for num_prompt, count in zip(step.batch.num_prompt_tokens, inputs.q_lens, strict=True)
    ]
    if inputs.q_starts is None:
        kept = torch.where(is_prompt, q_lens, q_lens.clamp(max=most))
    else:
        kept = to_device(fed, q_lens.device, torch.int64)
    ends = kept.cumsum(0)
    places = torch.arange(sum(fed), device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    offsets = places - (ends - kept)[requests]
    nodes = path[requests, offsets.clamp(max=path.shape[1] - 1)].clamp(min=0)
    source = starts[requests] + torch.where(is_prompt[requests], offsets, nodes)
    positions = inputs.positions[starts][requests] + offsets
    bounds = zip(inputs.kv_len_upper_bounds, inputs.q_lens, fed, strict=True)
    batch = replace(
        inputs,
        input_ids=inputs.input_ids[source],
        positions=positions,
        slots=page_table[inputs.rows[requests], positions].to(torch.int64),
        q_lens=fed,
        kv_lens=inputs.kv_lens - q_lens + kept,
        kv_len_upper_bounds=[bound - count + rows for bound, count, rows in bounds],
        ancestors=None,
        tree_starts=None,
        q_starts=None,
        hidden=hidden[source],
    )
    return batch, ends - kept, ends
