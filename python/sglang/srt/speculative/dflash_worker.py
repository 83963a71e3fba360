"""DFlash: a head over the target's hidden states drafts a block of tokens in one pass.

The head has a KV pool of its own behind the target's page table. Its slot at position p holds K and
V of the target's hidden states of p, so the head runs behind the target, over the same rows. A
block lies behind them: the certain token and mask tokens, whose K and V the next step overwrites.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.layers.forward_options import NO_CAPTURE
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.speculative.draft_steps import DraftSteps, plan_draft_steps
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.rounds import measured_rounds, needs_of_rounds, planner_of_rounds
from sglang.srt.step.step_ops import Q_START


class DFlashDrafter(Drafter):
    """Every request proposes a chain, the first drafts of its block. All that are proposed in a
    step have the same length, from 0 on: its tier."""

    def __init__(self, parts: DrafterParts) -> None:
        options: EagleConfig = parts.options
        self._runner = parts.runners.runners[1]
        self._table = parts.runners.memory.table
        self._state = parts.state
        self._is_asked = parts.state.confidence is not None  # how sure it is of its drafts
        self._rounds = options.rounds

    @staticmethod
    def needs(options: EagleConfig) -> DrafterNeeds:
        return replace(
            needs_of_rounds(options.rounds),
            capture=options.capture,
            suppressed_token_ids=options.suppressed_token_ids,
            proposes_without_output=True,
        )

    @staticmethod
    def models(options: EagleConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        head = replace(
            target,
            model=options.head,
            capture=NO_CAPTURE,
            draft_steps=options.rounds.draft_steps,
            may_rest=target.capabilities.reads_kv_starts,
        )
        return (head,)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        rounds = parts.options.rounds
        prices = measured_rounds(parts, rounds.policy.may_rest)
        return PlannedDrafter(planner_of_rounds(rounds, parts, prices), cls(parts))

    def extend(self, step: ComputedStep) -> None:
        """Stores K and V of the target's hidden states of all rows. What it writes for drafts that
        were rejected lies after the watermark."""
        assert step.forward.taps is not None, "The target gives what `DrafterNeeds.capture` names."
        last = step.chosen.layout.per_request[Q_START] + step.accepted.kept_lens - 1
        self._runner.forward(replace(step.inputs, hidden=step.forward.taps, read_index=last))

    def propose(self, step: ExtendedStep) -> None:
        tier = max(step.plan.next_drafts)
        if tier == 0:
            return
        steps = plan_draft_steps(step, self._table, self._rounds.num_draft_slots(tier))
        drafts = self.draft(steps, tier).limited(steps.num_drafts)
        drafts.write(self._runner.step_ops, self._state, steps.rows)

    def draft(self, steps: DraftSteps, num_drafts: int) -> EagleVerifyInput:
        """Chains after the certain tokens of the D requests that draft."""
        drafts = self._runner.draft(steps.batch(0, steps.certain_tokens), num_drafts)
        confidence = drafts.logprobs.exp() if self._is_asked else None
        return EagleVerifyInput(drafts.token_ids, confidence)
