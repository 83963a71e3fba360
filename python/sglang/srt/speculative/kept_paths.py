"""Lays out what a drafter's model is fed after a step whose drafts were trees: the confirmed paths,
which have been moved to the front by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.step_ops import NUM_PROMPT, Q_LEN, Q_START


@dataclass(frozen=True, slots=True)
class KeptPaths:
    """The rows of a step that R requests may have kept.

    Attributes:
        inputs: what the target was given.
        per_request: [NUM_COUNTS, R] int64, contiguous; as in `RowLayout`.
        path: [R, W] int32; rows of each request's path, after its end anything.
        most: rows of a path, at most.
        fed: host list of R; rows that each request is fed again.
        kept: [R] int64; the same on the device; None: it follows from `per_request`.
    """

    inputs: ForwardBatch
    per_request: torch.Tensor
    path: torch.Tensor
    most: int
    fed: list[int]
    kept: torch.Tensor | None

    @classmethod
    def of_step(cls, step: ComputedStep) -> KeptPaths:
        inputs, most, path = step.inputs, step.plan.max_accepted, step.accepted.path
        assert path is not None, "A step with trees confirms paths."
        fed = [
            num_prompt or min(count, most)
            for num_prompt, count in zip(step.batch.num_prompt_tokens, inputs.q_lens, strict=True)
        ]
        kept = None
        if inputs.q_starts is not None:
            kept = to_device(fed, path.device, torch.int64)
        return cls(inputs, step.chosen.layout.per_request, path, most, fed, kept)


class PathRows(NamedTuple):
    """The T rows of `KeptPaths`, each request's side by side.

    Attributes:
        input_ids, positions, slots: [T] int64.
        sources: [T] int64; the row of the step that each was.
        kv_lens: [R] int64; after the rows of each request.
        starts, ends: [R] int64; where the rows of each request begin and end.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor
    kv_lens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


FindPathRows = Callable[[KeptPaths, torch.Tensor], PathRows]  # given the page table


def torch_path_rows(kept_paths: KeptPaths, page_table: torch.Tensor) -> PathRows:
    """For a CPU; the oracle of all others."""
    inputs, path, most = kept_paths.inputs, kept_paths.path, kept_paths.most
    starts, q_lens, is_prompt = (
        kept_paths.per_request[name] for name in (Q_START, Q_LEN, NUM_PROMPT)
    )
    is_prompt = is_prompt > 0
    kept = kept_paths.kept
    if kept is None:
        kept = torch.where(is_prompt, q_lens, q_lens.clamp(max=most))
    ends = kept.cumsum(0)
    places = torch.arange(sum(kept_paths.fed), device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    offsets = places - (ends - kept)[requests]
    nodes = path[requests, offsets.clamp(max=path.shape[1] - 1)].clamp(min=0)
    sources = starts[requests] + torch.where(is_prompt[requests], offsets, nodes)
    positions = inputs.positions[starts][requests] + offsets
    return PathRows(
        input_ids=inputs.input_ids[sources],
        positions=positions,
        slots=page_table[inputs.rows[requests], positions].to(torch.int64),
        sources=sources,
        kv_lens=inputs.kv_lens - q_lens + kept,
        starts=ends - kept,
        ends=ends,
    )


def rows_of_paths(
    step: ComputedStep, page_table: torch.Tensor, hidden: torch.Tensor, find: FindPathRows
) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
    """The rows of a step that its requests may have kept, each request's side by side and without
    branches: all rows of a prompt, and of other requests the certain token and the confirmed path.
    Where a path is shorter than it may be, rows follow that lie after the watermark and mean
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
    kept_paths = KeptPaths.of_step(step)
    inputs, fed = step.inputs, kept_paths.fed
    rows = find(kept_paths, page_table)
    bounds = zip(inputs.kv_len_upper_bounds, inputs.q_lens, fed, strict=True)
    batch = replace(
        inputs,
        input_ids=rows.input_ids,
        positions=rows.positions,
        slots=rows.slots,
        q_lens=fed,
        kv_lens=rows.kv_lens,
        kv_len_upper_bounds=[bound - count + num_rows for bound, count, num_rows in bounds],
        ancestors=None,
        tree_starts=None,
        q_starts=None,
        hidden=hidden[rows.sources],
    )
    return batch, rows.starts, rows.ends
