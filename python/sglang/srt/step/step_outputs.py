"""Hidden states and log-probabilities of prompt tokens, which all workers return in one way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.logprobs import LogprobTensors, query_prompt_logprobs
from sglang.srt.step.forward_inputs import row_indices
from sglang.srt.step.step_ops import NUM_PROMPT, AcceptedTokens, ReadRows, RowLayout
from sglang.srt.step.worker import LogprobPlan, ScheduleBatch


def hidden_of_reads(hidden: torch.Tensor, reads: ReadRows) -> torch.Tensor:
    """[S, D]: hidden states of the rows read. `hidden` has those alone, or all T rows of a step."""
    return hidden if len(hidden) == len(reads.index) else hidden[reads.index]


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
