"""Multi-token prediction: one model predicts k tokens per step from mask tokens.

A step feeds the pending tokens (or a prompt chunk), then mask tokens. Masks come last, so under
causal attention they change nothing before them: requests with any k, threshold and mode, and
requests without look-ahead, share one batch, and a row may be padded with masks to any width.
Nothing here waits for the device: what depends on the step before is gathered from device rows.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.mtp.lookahead_rows import LookaheadPlan, LookaheadRows
from sglang.srt.mtp.mask_ops import MaskOps
from sglang.srt.registry import LENGTH_POLICIES, load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import ComputedStep, DrafterParts, ExtendedStep, RowPlan
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.length_policy import LengthPolicy
from sglang.srt.speculative.upcoming_step import Budget
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


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that was launched and not read; `was_chosen`: the length policy chose its lengths."""

    rows: list[int]
    plan: LookaheadPlan
    was_chosen: bool


class MaskDrafter:
    """Drafts are what the model itself predicted from mask tokens in the step before.

    Args:
        state: device rows with room for `max_k` pending tokens.
        policy: how many tokens may be predicted under the load at hand.
        ops: an implementation of `MaskOps`.
    """

    def __init__(
        self, state: RequestRows, config: MTPConfig, policy: LengthPolicy, ops: type[MaskOps]
    ) -> None:
        self._state = state
        self._config = config
        self._policy = policy
        num_rows, device = state.num_rows, str(state.committed.device)
        self._lookahead = LookaheadRows(num_rows, device, config.limits_unverified)
        self._ops = ops(state, self._lookahead.thresholds)
        self._unread: deque[_Unread] = deque()
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
    def make(cls, parts: DrafterParts) -> MaskDrafter:
        config: MTPConfig = parts.options
        policy: LengthPolicy = LENGTH_POLICIES.load(config.length_policy)(
            parts.prices, config.max_k
        )
        return cls(parts.state, config, policy, load(parts.runners.target.operations.masks))

    def step_width(self, params: SamplingParams) -> StepWidth:
        k = params.num_predicted
        return PLAIN_WIDTH if k == 1 else StepWidth(2 * k - 1, k - 1, k)

    def admit(self, new_rows: list[NewRow]) -> None:
        self._lookahead.initialize(new_rows)

    def observe(self, result: HostResult) -> None:
        """Tells the length policy how many tokens of the oldest unread step were accepted."""
        step = self._unread.popleft()
        accepted = self._lookahead.accepted(
            step.rows, step.plan, result.accept_lens, result.num_drafts
        )
        if step.was_chosen:
            self._policy.observe(accepted, result.tier)

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        config, lookahead = self._config, self._lookahead
        longest = None
        if config.trims_rows:
            longest = int(self._state.pending_lens[batch.rows].max())
        budget = self._budget(batch, longest)
        limit = config.max_k if budget is None else budget.limit
        plan = lookahead.plan(batch, limit, longest)
        num_rows = None if budget is None else budget.num_rows
        if config.packs_rows and num_rows is not None and not plan.counts.is_plain:
            plan = plan.packed(batch, num_rows)
        self._unread.append(_Unread(batch.rows, plan, budget is not None))
        is_unconfirmed = not all(plan.counts.emits_only_confirmed)
        return RowPlan(
            plan.counts,
            max_pending=max(plan.max_pending),
            max_accepted=max(1, *plan.max_accepted),
            lookahead_token=config.mask_token_id,
            wants_probs=not plan.counts.is_plain
            and any(lookahead.host_thresholds[row] > 0 for row in batch.rows),
            accepts_unconfirmed=self._ops.num_confident if is_unconfirmed else None,
            tier=0 if budget is None else limit,
        )

    def extend(self, step: ComputedStep) -> None:
        """The drafts are what the target chose after its mask tokens."""
        if not step.plan.is_plain:
            self._ops.propose(step.chosen, step.accepted)
        if self._config.bypasses_graphs and not step.forward.used_graph:
            self._warn_of_bypass(step)

    def propose(self, step: ExtendedStep) -> None:
        """Nothing: the step itself has given the drafts."""

    def _warn_of_bypass(self, step: ComputedStep) -> None:
        """Warns once, of the first request whose look-ahead ran without a graph."""
        looks_ahead = self._unread[-1].plan.looks_ahead
        if self._has_warned or not any(looks_ahead):
            return
        self._has_warned = True
        index, batch = looks_ahead.index(True), step.batch
        has_threshold = self._lookahead.host_thresholds[batch.rows[index]] > 0
        logger.warning(
            "--disable-mtp-cuda-graph: steps of several rows run without CUDA graphs"
            " (decode_q_len_per_req=%d, mtp_phase=%s, mtp_strategy_kind=%s).",
            step.plan.counts.q_lens[index],
            "seed" if batch.num_prompt_tokens[index] else "steady",
            "conf_adapt" if has_threshold else "static",
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
