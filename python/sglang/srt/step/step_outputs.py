"""Hidden states and log-probabilities that a step returns beside its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.layers.logprobs import LogprobQueries, LogprobTensors, query_prompt_logprobs
from sglang.srt.layers.sampler import in_aligned_float32
from sglang.srt.step.forward_inputs import row_indices
from sglang.srt.step.step_ops import (
    NUM_PROMPT,
    READ_START,
    AcceptedTokens,
    ReadRows,
    RowLayout,
)
from sglang.srt.step.worker import LogprobPlan, ScheduleBatch


def hidden_of_reads(hidden: torch.Tensor, inputs: ForwardBatch, reads: ReadRows) -> torch.Tensor:
    """Returns [S, D]: hidden states of the rows read. `hidden` has those alone, or all T rows of a
    step."""
    in_order = inputs.q_starts is None or inputs.read_index is not None
    if in_order and len(hidden) == len(reads.index):
        return hidden
    return hidden[reads.index]


def taps_of_drafter(taps: torch.Tensor | None, capture: HiddenCapture) -> torch.Tensor | None:
    """Returns [T, len(capture.layers) * D] of taps [T, len(capture.taps) * D]; None if the drafter
    reads none."""
    if taps is None or not capture.layers:
        return None
    return taps[:, : taps.shape[1] // len(capture.taps) * len(capture.layers)].contiguous()


class RunRows(NamedTuple):
    """The rows of a step whose tokens are accepted.

    Attributes:
        output: what the target gave of all T rows; None where nobody may ask for it.
    """

    inputs: ForwardBatch
    layout: RowLayout
    accepted: AcceptedTokens
    output: ModelOutput | None


def hidden_states(
    batch: ScheduleBatch, run: RunRows, capture: HiddenCapture
) -> torch.Tensor | None:
    """Picks the rows `batch.hidden_rows` out of the T of a step: [H, len(capture.returned) + 1, D],
    those layers' inputs and the last hidden state, in the model's type; None if there are none."""
    if not batch.hidden_rows:
        return None
    assert run.output is not None, "The step was to give hidden states."
    hidden, taps = run.output
    index = _hidden_index(batch, run.inputs, run.layout, run.accepted)
    if taps is None or not capture.returned:
        return hidden[index][:, None]
    layers = taps.view(len(taps), -1, hidden.shape[1])
    states = hidden.new_empty(len(index), len(capture.returned) + 1, hidden.shape[1])
    for place, each in enumerate([*(layers[:, at] for at in capture.places), hidden]):
        states[:, place] = each[index]
    return states


def _hidden_index(
    batch: ScheduleBatch, inputs: ForwardBatch, layout: RowLayout, accepted: AcceptedTokens
) -> torch.Tensor:
    """Finds the rows `batch.hidden_rows` among the T of a step: [H] int64. In a tree the rows of
    the accepted path count as its first ones."""
    refs, lookahead, device = batch.hidden_rows, layout.lookahead, inputs.rows.device
    if lookahead is None or (lookahead.parents is None and inputs.q_starts is None):
        return row_indices(refs, inputs.q_lens, device)
    request, offset = to_device(refs, device, torch.int64).T
    if lookahead.parents is not None and accepted.path is not None:
        kept = offset.clamp(max=accepted.path.shape[1] - 1)
        is_node = layout.per_request[NUM_PROMPT][request] == 0
        offset = torch.where(is_node, accepted.path[request, kept].clamp(min=0), offset)
    starts = lookahead.q_starts
    last = (starts[request + 1] - starts[request] - 1).clamp(min=0)
    return starts[request] + torch.minimum(offset, last)


def logits_to_read(batch: ScheduleBatch, logits: torch.Tensor) -> torch.Tensor:
    """Returns logits [S, V] as tokens and log-probabilities are found in them. In fixed orders they
    have one form, with requests that adjust logits in the step or without."""
    return in_aligned_float32(logits) if batch.fixed_orders else logits


def prompt_logprobs(
    batch: ScheduleBatch,
    hidden: torch.Tensor,
    q_lens: list[int],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    banned: torch.Tensor | None,
) -> LogprobTensors | None:
    """Returns log-probabilities of prompt tokens, in the model's own distribution of all that are
    not banned [B] int64; hidden [T, D]."""
    plan = batch.logprobs
    if plan is None or not plan.prompt_rows:
        return None

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        return logits_to_read(batch, compute_logits(part))

    rows = row_indices(plan.prompt_rows, q_lens, hidden.device)
    return query_prompt_logprobs(hidden, rows, logits_of, plan.prompt_targets, plan.prompts, banned)


def emitted_queries(
    plan: LogprobPlan, layout: RowLayout, accepted: AcceptedTokens
) -> tuple[LogprobQueries, torch.Tensor | None]:
    """Finds the log-probabilities that emitting requests want of the rows that gave their tokens,
    and those rows among the S read, [Q] int64: M for each request, meaningless past its accepted
    tokens. None: all rows, in order."""
    starts, path = layout.per_request[READ_START], accepted.path
    num_reads, emitting = layout.reads.index.shape[0], plan.emitting
    if path is None and len(emitting) == num_reads:
        return plan.emitted, None
    places = starts[to_device(emitting, starts.device, torch.int64)][:, None]
    if path is not None:
        places = places + path[to_device(emitting, path.device, torch.int64)].clamp(min=0)
    width = accepted.next_token_ids.shape[1]
    token_ids = [ids for ids in plan.emitted.token_ids for _ in range(width)]
    kept = [wants for wants in plan.emitted.kept for _ in range(width)]
    queries = LogprobQueries(plan.emitted.top_num, token_ids, kept)
    return queries, places.clamp(max=num_reads - 1).flatten()
