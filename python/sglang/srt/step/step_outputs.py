"""Hidden states and log-probabilities of prompt tokens, which all workers return in one way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.layers.logprobs import LogprobTensors, query_prompt_logprobs
from sglang.srt.step.forward_inputs import row_indices
from sglang.srt.step.step_ops import ReadRows
from sglang.srt.step.worker import LogprobPlan, ScheduleBatch


def hidden_of_reads(hidden: torch.Tensor, reads: ReadRows) -> torch.Tensor:
    """[S, D]: hidden states of the rows read. `hidden` has those alone, or all T rows of a step."""
    return hidden if len(hidden) == len(reads.index) else hidden[reads.index]


def hidden_states(
    batch: ScheduleBatch, hidden: torch.Tensor, q_lens: list[int]
) -> torch.Tensor | None:
    """Those of `batch.hidden_rows` out of hidden [T, D]: [H, D], of its type; None for none."""
    if not batch.hidden_rows:
        return None
    return hidden[row_indices(batch.hidden_rows, q_lens, hidden.device)]


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
