"""What a step hands out beside tokens: hidden states, log-probabilities of prompt tokens, and its
drafts to whoever restricts tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.srt.device_copies import HostCopy, to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.logprobs import LogprobTensors, query_prompt_logprobs
from sglang.srt.step.forward_inputs import row_indices
from sglang.srt.step.step_ops import (
    NUM_PROMPT,
    READ_START,
    AcceptedTokens,
    ReadRows,
    RowLayout,
)
from sglang.srt.step.token_constraint import DraftedTokens
from sglang.srt.step.worker import LogprobPlan, ScheduleBatch


def hidden_of_reads(hidden: torch.Tensor, inputs: ForwardBatch, reads: ReadRows) -> torch.Tensor:
    """[S, D]: hidden states of the rows read. `hidden` has those alone, or all T rows of a step."""
    in_order = inputs.q_starts is None or inputs.read_index is not None
    if in_order and len(hidden) == len(reads.index):
        return hidden
    return hidden[reads.index]


def hidden_states(
    batch: ScheduleBatch,
    inputs: ForwardBatch,
    layout: RowLayout,
    accepted: AcceptedTokens,
    hidden: torch.Tensor,
) -> torch.Tensor | None:
    """Those of `batch.hidden_rows` out of hidden [T, D]: [H, D], of its type; None for none. Of a
    tree the rows of the accepted path are taken for its first ones."""
    refs, lookahead = batch.hidden_rows, layout.lookahead
    if not refs:
        return None
    if lookahead is None or (lookahead.parents is None and inputs.q_starts is None):
        return hidden[row_indices(refs, inputs.q_lens, hidden.device)]
    request, offset = to_device(refs, hidden.device, torch.int64).T
    if lookahead.parents is not None and accepted.path is not None:
        kept = offset.clamp(max=accepted.path.shape[1] - 1)
        is_node = layout.per_request[NUM_PROMPT][request] == 0
        offset = torch.where(is_node, accepted.path[request, kept].clamp(min=0), offset)
    starts = lookahead.q_starts
    last = (starts[request + 1] - starts[request] - 1).clamp(min=0)
    return hidden[starts[request] + torch.minimum(offset, last)]


def prompt_logprobs(
    plan: LogprobPlan,
    hidden: torch.Tensor,
    q_lens: list[int],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> LogprobTensors | None:
    """Of prompt tokens, in the model's own distribution; hidden [T, D]."""
    if not plan.prompt_rows:
        return None
    rows = row_indices(plan.prompt_rows, q_lens, hidden.device)
    return query_prompt_logprobs(hidden, rows, compute_logits, plan.prompt_targets, plan.prompts)


class DraftedCopy:
    """The drafts of a step on their way to the host."""

    def __init__(self, layout: RowLayout) -> None:
        lookahead = layout.lookahead
        parts = [layout.per_request]
        if lookahead is not None:
            parts += [layout.input_ids, lookahead.q_starts, lookahead.num_pending]
            parts += [] if lookahead.parents is None else [lookahead.parents]
        self._copy = HostCopy(parts)

    def read(self, requests: Sequence[int]) -> list[DraftedTokens]:
        """Those of `requests`. Waits until the step is laid out, not for its forward pass."""
        per_request, *more = self._copy.read()
        starts = per_request[READ_START].tolist()
        if not more:
            return [DraftedTokens(starts[i], [], []) for i in requests]
        ids, q_starts, num_pending = (tensor.tolist() for tensor in more[:3])
        found = []
        for i in requests:
            first, end = q_starts[i] + 1, q_starts[i] + num_pending[i]
            parents = list(range(end - first))
            if len(more) > 3:
                parents = more[3][first:end].tolist()
            found.append(DraftedTokens(starts[i], ids[first:end], parents))
        return found
