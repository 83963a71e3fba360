"""Multi-token prediction: one model predicts k tokens per step from mask tokens.

A step feeds the pending tokens (or a prompt chunk), then mask tokens. Masks come last, so under
causal attention they change nothing before them: requests with any k, threshold and mode, and
requests without look-ahead, share one batch, and a row may be padded with masks to any width.
Nothing here waits for the device: what depends on the step before is gathered from device rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.mtp.lookahead_rows import LookaheadRows
from sglang.srt.mtp.mask_ops import MaskOps
from sglang.srt.registry import LENGTH_POLICIES, load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import (
    ChosenTokens,
    ComputedStep,
    Drafter,
    DrafterParts,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """The settings of the drafter.

    Attributes:
        mask_token_id: fed by look-ahead rows; never emitted.
        max_k: tokens that a request may predict per step, at most.
        limits_unverified: the length policy also shortens unverified requests, whose output
            depends on k.
        trims_rows: look at how many tokens are pending and pad to the longest run of the batch, not
            to the longest possible one: for devices where looking costs nothing.
        packs_rows: where the length policy grants a step fewer rows than requests may need, the
            device divides them by what is pending then; for attention backends that learn lengths
            there. If not, each request has the most rows that it may need.
        length_policy: a name in `LENGTH_POLICIES` (registry.py).
        bypasses_graphs: steps of several rows per request replay no captured graph, though steps of
            one row do; the first such step logs a warning.
    """

    mask_token_id: int
    max_k: int
    limits_unverified: bool = False
    trims_rows: bool = False
    packs_rows: bool = False
    length_policy: str = "full_length"
    bypasses_graphs: bool = False


class MaskPlanner(Planner):
    """Plans how many masks each request feeds.

    Args:
        policy: how many tokens may be predicted under the load at hand.
        num_rows: of the page table.
    """

    def __init__(self, config: MTPConfig, policy: LengthPolicy, num_rows: int) -> None:
        self._config = config
        self._policy = policy
        self._lookahead = LookaheadRows(num_rows, config.limits_unverified)

    def step_width(self, params: SamplingParams) -> StepWidth:
        k = params.num_predicted
        return PLAIN_WIDTH if k == 1 else StepWidth(2 * k - 1, k - 1, k)

    def admit(self, new_rows: list[NewRow]) -> None:
        self._lookahead.initialize(new_rows)

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """Tells the length policy, if it was asked, how many tokens were accepted."""
        accepted = self._lookahead.accepted(record, result)
        if record.plan.budget is not None:
            self._policy.observe(accepted, record.plan.budget)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """See `Planner`; lens are of pending tokens."""
        config, lookahead = self._config, self._lookahead
        longest = None if lens is None else max(lens[row] for row in batch.rows)
        budget = self._budget(batch, longest)
        limit = config.max_k if budget is None else budget.limit
        plan = lookahead.plan(batch, limit, longest)
        num_rows = None if budget is None else budget.num_rows
        if config.packs_rows and num_rows is not None and not plan.counts.is_plain:
            plan = plan.packed(batch, num_rows)
        return StepPlan(
            counts=plan.counts,
            max_pending=max(plan.max_pending),
            max_accepted=max(1, *plan.max_accepted),
            lookahead_token=config.mask_token_id,
            wants_probs=not plan.counts.is_plain
            and any(lookahead.thresholds[row] > 0 for row in batch.rows),
            accepts_unconfirmed=not all(plan.counts.emits_only_confirmed),
            tier=0 if budget is None else limit,
            budget=budget,
        )

    def _budget(self, batch: ScheduleBatch, longest_pending: int | None) -> Budget | None:
        """Returns what the policy grants requests whose length it may choose; None where none of
        them looks ahead."""
        rows = self._lookahead
        if not any(
            emits and rows.max_predicted[row] > 1 and rows.is_adjustable(row)
            for row, emits in zip(batch.rows, batch.emits, strict=True)
        ):
            return None
        is_packed = self._config.packs_rows
        return self._policy.choose(rows.upcoming_step(batch, longest_pending, is_packed))


class MaskDrafter(Drafter):
    """Drafts are what the model itself predicted from mask tokens in the step before.

    Args:
        state: device rows with room for `max_k` pending tokens.
        ops: an implementation of `MaskOps`.
    """

    def __init__(self, state: RequestRows, config: MTPConfig, ops: type[MaskOps]) -> None:
        self._state = state
        self._config = config
        self._thresholds = torch.zeros(state.num_rows, device=state.committed.device)
        self._ops = ops(state, self._thresholds)
        self._has_warned = False

    @staticmethod
    def needs(options: MTPConfig) -> DrafterNeeds:
        policy: type[LengthPolicy] = LENGTH_POLICIES.load(options.length_policy)
        return DrafterNeeds(
            max_drafts=options.max_k - 1,
            max_rows=2 * options.max_k - 1,
            max_masks=options.max_k - 1 if options.packs_rows else None,
            suppressed_token_ids=(options.mask_token_id,),
            needs_prices=policy.needs_prices,
            bypasses_graphs=options.bypasses_graphs,
        )

    @staticmethod
    def models(options: MTPConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        config: MTPConfig = parts.options
        policy = LENGTH_POLICIES.load(config.length_policy)(parts.prices, config.max_k)
        planner = MaskPlanner(config, policy, parts.state.num_rows)
        ops = load(parts.runners.target.operations.masks)
        return PlannedDrafter(planner, cls(parts.state, config, ops))

    def lens(self) -> torch.Tensor | None:
        return self._state.pending_lens if self._config.trims_rows else None

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        if batch.new_rows:
            device = self._thresholds.device
            rows = to_device([new.row for new in batch.new_rows], device)
            thresholds = [new.params.mtp_threshold for new in batch.new_rows]
            self._thresholds[rows] = to_device(thresholds, device, torch.float32)

    def num_unconfirmed(self, chosen: ChosenTokens) -> torch.Tensor:
        return self._ops.num_confident(chosen)

    def extend(self, step: ComputedStep) -> None:
        """The drafts are what the target chose after its mask tokens."""
        if not step.plan.is_plain:
            self._ops.propose(step.chosen, step.accepted)
        if self._config.bypasses_graphs and not step.forward.used_graph:
            self._warn_of_bypass(step)

    def _warn_of_bypass(self, step: ComputedStep) -> None:
        """Warns once, of the first request whose look-ahead ran without a graph."""
        batch, predicted = step.batch, step.plan.counts.num_predicted
        index = next((index for index, count in enumerate(predicted) if count > 1), None)
        if self._has_warned or index is None:
            return
        self._has_warned = True
        has_threshold = bool(self._thresholds[batch.rows[index]] > 0)
        logger.warning(
            "--disable-mtp-cuda-graph: steps of several rows run without CUDA graphs"
            " (decode_q_len_per_req=%d, mtp_phase=%s, mtp_strategy_kind=%s).",
            step.plan.counts.q_lens[index],
            "seed" if batch.num_prompt_tokens[index] else "steady",
            "conf_adapt" if has_threshold else "static",
        )
