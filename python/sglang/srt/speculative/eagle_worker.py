"""EAGLE and EAGLE-3: a head over the target's hidden states drafts chains or trees.

The head has a KV pool of its own behind the target's page table. Its slot at position p holds KV of
the token at p + 1 and the target's hidden state of p: the token is known once the target has chosen
it, so the head runs behind the target, over the same rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.layers.forward_options import NO_CAPTURE
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.registry import load
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
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.kept_paths import rows_of_paths
from sglang.srt.speculative.rounds import measured_rounds, needs_of_rounds, planner_of_rounds
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from sglang.srt.step.request_rows import confidence_of_scores
from sglang.srt.step.step_ops import Q_LEN, Q_START

TOPK = 1  # drafts that follow each one of a chain


class EagleDrafter(Drafter):
    """Every request proposes a chain, whatever its parameters are, or every request a tree. All
    chains of a step have the same length, from 0 on: its tier. All trees have the same shape."""

    def __init__(self, parts: DrafterParts) -> None:
        options: EagleConfig = parts.options
        self._reads_taps = bool(options.capture.layers)
        self._runner = parts.runners.runners[1]
        head = self._runner.model
        assert isinstance(head, DraftHead)
        self._head = head
        self._table = parts.runners.memory.table
        self._state = parts.state
        self._find_path_rows = load(parts.runners.target.operations.paths)
        self._ops = sampling_ops(self._runner.device)
        self._rounds = options.rounds
        self._is_asked = parts.state.confidence is not None  # how sure it is of its drafts

    @staticmethod
    def needs(options: EagleConfig) -> DrafterNeeds:
        return replace(
            needs_of_rounds(options.rounds),
            capture=options.capture,
            suppressed_token_ids=options.suppressed_token_ids,
            token_shift=1,
        )

    @staticmethod
    def models(options: EagleConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        steps = options.rounds.draft_steps
        # Of trees the head is fed the confirmed path alone, as a prompt.
        target = replace(target, capture=NO_CAPTURE, captures_trees=False)
        may_rest = target.capabilities.reads_kv_starts
        return (replace(target, model=options.head, draft_steps=steps, may_rest=may_rest),)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        rounds = parts.options.rounds
        prices = measured_rounds(parts, rounds.policy.may_rest)
        return PlannedDrafter(planner_of_rounds(rounds, parts, prices), cls(parts))

    def extend(self, step: ComputedStep) -> torch.Tensor:
        return self.forward_draft_extend(step)

    def propose(self, step: ExtendedStep) -> None:
        num_drafts = max(step.plan.next_drafts)
        if num_drafts == 0:
            return
        assert step.output is not None, "The head was fed the step."
        tier = num_drafts if self._rounds.tree is None else self._rounds.num_steps
        steps = plan_draft_steps(step, self._table, self._rounds.num_draft_slots(tier))
        drafts = self.draft(steps, steps.of_requests(step.output)).limited(steps.num_drafts)
        drafts.write(self._runner.step_ops, self._state, steps.rows)

    def forward_draft_extend(self, step: ComputedStep) -> torch.Tensor:
        """The head over the rows that the target was fed: of prompts, and of the certain token and
        its drafts, of a tree those on the confirmed path. What it writes for drafts that were
        rejected lies after the watermark.

        Returns:
            [R, hidden_size]; its output at the last row kept of each request.
        """
        hidden = step.forward.taps if self._reads_taps else step.forward.hidden
        assert hidden is not None, "The target gives what `DrafterNeeds.capture` names."
        if step.inputs.ancestors is None:
            per_request = step.chosen.layout.per_request
            starts, inputs = per_request[Q_START], replace(step.inputs, hidden=hidden)
            ends = starts + per_request[Q_LEN]
        else:
            inputs, starts, ends = rows_of_paths(
                step, self._table.req_to_token, hidden, self._find_path_rows
            )
        rows = rows_of_requests(ends, inputs)
        batch = replace(
            inputs,
            input_ids=next_tokens(step.state, rows, inputs.positions),
            read_index=starts + step.accepted.kept_lens - 1,
        )
        return self._runner.forward(batch).hidden

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        """Chains or trees after the certain tokens of the D requests that draft; hidden
        [D, hidden_size] is the head's output at the row before each."""
        if self._rounds.tree is not None:
            first = steps.batch(0, steps.certain_tokens, hidden)
            trees = self._runner.draft_trees(first, self._rounds.tree)
            confidence = confidence_of_scores(trees.scores) if self._is_asked else None
            return EagleVerifyInput(trees.token_ids, confidence, trees.parents)
        token_ids, scores = select_top_k_tokens(
            self._runner.compute_logits(hidden), None, TOPK, self._ops
        )
        drafts = EagleDraftInput(self._head.to_target_ids(token_ids), hidden, scores)
        if steps.num_steps == 0:
            return organize_draft_results([drafts])
        first = steps.batch(0, drafts.token_ids, hidden)
        more = self._runner.draft(first, steps.num_steps)
        chains = torch.cat((drafts.token_ids[:, None], more.token_ids), dim=1)
        if not self._is_asked:
            return EagleVerifyInput(chains)
        probs = torch.cat((scores[:, None], more.logprobs.exp()), dim=1)
        return EagleVerifyInput(chains, probs)


# SGLang's name of it. The target's pass and verification are no part: see `TpModelWorker`.
EAGLEWorker = EagleDrafter
