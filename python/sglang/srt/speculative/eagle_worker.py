"""EAGLE and EAGLE-3: a head over the target's hidden states drafts chains.

The head has a KV pool of its own behind the target's page table. Its slot at position p holds KV of
the token at p + 1 and the target's hidden state of p: the token is known once the target has chosen
it, so the head runs behind the target, over the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.head_config import EAGLE3, tap_layers
from sglang.srt.layers.forward_batch import NO_CAPTURE, ForwardBatch, HiddenCapture
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ExecutionConfig
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.draft_steps import DraftSteps, plan_draft_steps
from sglang.srt.speculative.drafter import (
    ComputedStep,
    DrafterNeeds,
    DrafterParts,
    RowPlan,
    verifying_plan,
)
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import Q_LEN, Q_START
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch, StepWidth

TOPK = 1  # drafts that follow each one: chains alone


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What the drafter needs to know.

    Attributes:
        head: of `load_head_config`, for this target.
        num_layers: of the target.
        num_steps: drafts of a chain, at least 1.
        suppressed_token_ids: ids that the target never emits.
    """

    head: ModelConfig
    num_layers: int
    num_steps: int
    suppressed_token_ids: tuple[int, ...] = ()

    @property
    def capture(self) -> HiddenCapture:
        """What the head reads of the target: its last hidden states, or those of some layers."""
        if self.head.architecture == EAGLE3:
            return HiddenCapture(tap_layers(self.head, self.num_layers))
        return HiddenCapture(all_rows=True)


class EagleDrafter:
    """Every request proposes a chain of `num_steps` drafts, whatever its parameters are."""

    def __init__(self, parts: DrafterParts) -> None:
        options: EagleConfig = parts.options
        self._num_steps = options.num_steps
        self._reads_taps = bool(options.capture.layers)
        self._runner = parts.runners.runners[1]
        head = self._runner.model
        assert isinstance(head, DraftHead)
        self._head = head
        self._table = parts.runners.memory.table
        self._state = parts.state
        self._ops = sampling_ops(self._runner.device)

    @staticmethod
    def needs(options: EagleConfig) -> DrafterNeeds:
        count = options.num_steps
        return DrafterNeeds(
            max_drafts=count,
            max_rows=1 + count,
            num_steps=count,
            extra_slots=count - 1,
            capture=options.capture,
            suppressed_token_ids=options.suppressed_token_ids,
            token_shift=1,
        )

    @staticmethod
    def models(options: EagleConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        steps = (options.num_steps - 1,) if options.num_steps > 1 else ()
        return (replace(target, model=options.head, capture=NO_CAPTURE, draft_steps=steps),)

    @classmethod
    def make(cls, parts: DrafterParts) -> EagleDrafter:
        return cls(parts)

    def step_width(self, params: SamplingParams) -> StepWidth:
        count = self._num_steps
        return StepWidth(decode_rows=2 * count, lookahead_rows=count - 1, max_kept=1 + count)

    def admit(self, new_rows: list[NewRow]) -> None:
        """Nothing is kept of a request but what the device rows and the pool hold."""

    def observe(self, result: HostResult) -> None:
        """Chains have one length, whatever becomes of them."""

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        plan = verifying_plan(batch, self._num_steps, 1 + self._num_steps)
        return replace(plan, tier=self._num_steps)

    def propose(self, step: ComputedStep) -> None:
        hidden = self.forward_draft_extend(step)
        steps = plan_draft_steps(step, self._table, self._num_steps - 1)
        if steps is not None:
            self.draft(steps, steps.of_requests(hidden)).write(self._state, steps.rows)

    def forward_draft_extend(self, step: ComputedStep) -> torch.Tensor:
        """The head over the rows that the target was fed: of prompts, and of the certain token and
        its drafts. What it writes for drafts that were rejected lies behind the watermark.

        Returns:
            [R, hidden_size]; its output at the last row kept of each request.
        """
        hidden = step.forward.taps if self._reads_taps else step.forward.hidden
        assert hidden is not None, "The target gives what `DrafterNeeds.capture` names."
        per_request, state = step.chosen.layout.per_request, step.state
        starts, inputs = per_request[Q_START], step.inputs
        rows = rows_of_requests(starts + per_request[Q_LEN], inputs)
        batch = replace(
            inputs,
            input_ids=next_tokens(state, rows, inputs.positions),
            read_index=starts + step.accepted.kept_lens - 1,
            hidden=hidden,
        )
        return self._runner.forward(batch).hidden

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        """Chains behind the certain tokens of the D requests that draft; hidden [D, hidden_size] is
        the head's output at the row before each."""
        token_ids, scores = select_top_k_tokens(
            self._runner.compute_logits(hidden), None, TOPK, self._ops
        )
        drafts = EagleDraftInput(self._head.to_target_ids(token_ids), hidden, scores)
        if self._num_steps == 1:
            return organize_draft_results([drafts])
        first = steps.batch(0, drafts.token_ids, hidden)
        more = self._runner.draft(first, self._num_steps - 1)
        probs = torch.cat((scores[:, None], more.logprobs.exp()), dim=1)
        return EagleVerifyInput(
            draft_token=torch.cat((drafts.token_ids[:, None], more.token_ids), dim=1),
            scores=probs.cumprod(dim=1),
        )


def rows_of_requests(ends: torch.Tensor, inputs: ForwardBatch) -> torch.Tensor:
    """[T] int64; the row of the token table that each row fed belongs to, of padding any.

    Args:
        ends: [R] int64; place behind the last row of each request.
    """
    places = torch.arange(inputs.input_ids.shape[0], device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    return inputs.rows[requests.clamp(max=len(ends) - 1)]


def next_tokens(state: RequestRows, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T] int64; the token at the position behind each of positions [T] of rows [T]: of a prompt's
    row the prompt's next one, also at a chunk's end; of the last row kept the certain one; behind
    rows that were not kept, any."""
    last = state.tokens.shape[1] - 1
    return state.tokens[rows, (positions + 1).clamp(max=last)].to(torch.int64)
