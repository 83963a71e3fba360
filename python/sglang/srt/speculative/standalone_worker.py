"""STANDALONE: a smaller model with an embedding and an output head of its own drafts chains.

It has a KV pool of its own behind the target's page table, whose slot at position p holds KV of the
token at p. So it runs over the rows that the target was fed, and then, one token at a time, over
the certain token and the drafts. What it has been fed as a draft it has KV of: after a step in
which every request verified drafts it is fed the rows one position further on, which end with the
new certain token, and so gives the first draft at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import NO_CAPTURE
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.speculative.draft_steps import (
    DraftSteps,
    next_tokens,
    plan_draft_steps,
    rows_of_requests,
)
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_configs import StandaloneConfig
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.rounds import measured_rounds, needs_of_rounds, planner_of_rounds
from sglang.srt.step.draft_shapes import DraftShape
from sglang.srt.step.step_ops import Q_LEN, Q_START


class StandaloneDrafter(Drafter):
    """Every request proposes a chain, whatever its parameters are: the draft model's best tokens.
    All that are proposed in a step have the same length, from 0 on: its tier."""

    def __init__(self, parts: DrafterParts) -> None:
        options: StandaloneConfig = parts.options
        self._runner = parts.runners.runners[1]
        self._table = parts.runners.memory.table
        self._state = parts.state
        self._is_asked = parts.state.confidence is not None  # how sure it is of its drafts
        self._ops = sampling_ops(self._runner.device)
        self._rounds = options.rounds

    @staticmethod
    def needs(options: StandaloneConfig) -> DrafterNeeds:
        return replace(
            needs_of_rounds(options.rounds),
            suppressed_token_ids=options.suppressed_token_ids,
            proposes_without_output=True,
        )

    @staticmethod
    def models(options: StandaloneConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        draft = replace(
            target,
            model=options.draft,
            capture=NO_CAPTURE,
            draft_steps=_draft_steps(options.rounds),
            reads_one_row=True,
            may_rest=target.capabilities.reads_kv_starts,
        )
        return (draft,)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        planner = planner_of_rounds(parts.options.rounds, parts, measured_rounds(parts))
        return PlannedDrafter(planner, cls(parts))

    def extend(self, step: ComputedStep) -> torch.Tensor | None:
        """Gives the output at the certain tokens, if the draft model is fed them."""
        hidden = self.forward_draft_extend(step)
        return hidden if all_verify(step) else None

    def propose(self, step: ExtendedStep) -> None:
        tier = max(step.plan.next_drafts)
        if tier == 0:
            return
        steps = plan_draft_steps(step, self._table, self._rounds.num_draft_slots(tier))
        of_certain = None if step.output is None else steps.of_requests(step.output)
        drafts = self.draft(steps, of_certain).limited(steps.num_drafts)
        drafts.write(self._runner.step_ops, self._state, steps.rows)

    def forward_draft_extend(self, step: ComputedStep) -> torch.Tensor:
        """The draft model over the rows that the target was fed, or if `all_verify` over those one
        position further on. What it writes for drafts that were rejected lies after the watermark.

        Returns:
            [R, hidden_size]; its output at the last row kept of each request: after the last token
            kept, or if `all_verify` after the certain token.
        """
        per_request, inputs = step.chosen.layout.per_request, step.inputs
        starts = per_request[Q_START]
        batch = replace(inputs, read_index=starts + step.accepted.kept_lens - 1)
        if all_verify(step):
            rows = rows_of_requests(starts + per_request[Q_LEN], inputs)
            batch = self._one_further(batch, rows)
        return self._runner.forward(batch).hidden

    def _one_further(self, batch: ForwardBatch, rows: torch.Tensor) -> ForwardBatch:
        """The rows [T] of a batch one position further on. Their slots are reserved: the request
        has some for draft steps. Padding is written to the dummy slot, as it was."""
        positions = batch.positions + 1
        slots = self._table.req_to_token[rows, positions].to(torch.int64)
        return replace(
            batch,
            input_ids=next_tokens(self._state, rows, batch.positions),
            positions=positions,
            slots=slots * (batch.slots > 0),
            kv_lens=batch.kv_lens + 1,
            kv_len_upper_bounds=[bound + 1 for bound in batch.kv_len_upper_bounds],
        )

    def draft(self, steps: DraftSteps, of_certain: torch.Tensor | None) -> EagleVerifyInput:
        """Chains after the certain tokens of the D requests that draft, of `steps.num_steps` each.

        Args:
            of_certain: [D, hidden_size]; the draft model's output at the certain tokens; None if it
                has not been fed them.
        """
        if of_certain is None:
            drafts = self._runner.draft(steps.batch(0, steps.certain_tokens), steps.num_steps)
            return self._told(drafts.token_ids, drafts.logprobs)
        best, _, logprobs = self._ops.argmax_logprob(self._runner.compute_logits(of_certain), None)
        token_ids, logprobs = best[:, None], logprobs[:, None]
        if steps.num_steps > 1:
            more = self._runner.draft(steps.batch(1, best), steps.num_steps - 1)
            token_ids = torch.cat((token_ids, more.token_ids), dim=1)
            logprobs = torch.cat((logprobs, more.logprobs), dim=1)
        return self._told(token_ids, logprobs)

    def _told(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> EagleVerifyInput:
        return EagleVerifyInput(token_ids, logprobs.exp() if self._is_asked else None)


# SGLang's name of it. The target's pass and verification are no part: see `TpModelWorker`.
StandaloneWorker = StandaloneDrafter


def all_verify(step: ComputedStep) -> bool:
    """Tells whether every request of a step verified drafts. Then the draft model was fed the token
    that was certain before, and has its KV."""
    prompts, counts = step.batch.num_prompt_tokens, step.plan.counts
    return not any(prompts) and all(q_len > 1 for q_len in counts.q_lens)


def _draft_steps(rounds: RoundOptions) -> dict[DraftShape, tuple[range, ...]]:
    """`ExecutionConfig.draft_steps`: for each tier as many draft steps as drafts, and one less,
    where the first draft needs none."""
    found: dict[int, tuple[range, ...]] = {}
    for state in rounds.states.values():
        for num_steps in (state.num_draft_steps - 1, state.num_draft_steps):
            if num_steps > 0:
                sizes = (*found.get(num_steps, ()), *state.batch_sizes)
                found[num_steps] = tuple(dict.fromkeys(sizes))
    return {num_steps: found[num_steps] for num_steps in sorted(found)}
