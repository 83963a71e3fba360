"""Multi-token prediction: one model predicts k tokens per step from mask tokens.

A step feeds the pending tokens (or a prompt chunk), then mask tokens. Masks come last, so under
causal attention they change nothing before them: requests with any k, threshold and mode, and
requests without look-ahead, share one batch, and a row may be padded with masks to any width.
Nothing here waits for the device: what depends on the step before is gathered from device rows.
"""

from __future__ import annotations

import logging

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.mask_planner import MaskPlanner, MTPConfig
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.registry import LENGTH_POLICIES, load
from sglang.srt.speculative.drafter import (
    ChosenTokens,
    ComputedStep,
    Drafter,
    DrafterParts,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.mask_ops import MaskOps
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch

logger = logging.getLogger(__name__)


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
        kind: type[LengthPolicy] = LENGTH_POLICIES.load(config.length_policy)
        policy = kind(PolicyParts(options=RoundOptions(config.max_k - 1), steps=parts.prices))
        planner = MaskPlanner(config, parts.state.num_rows, policy)
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
        if not step.plan.counts.is_plain:
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
