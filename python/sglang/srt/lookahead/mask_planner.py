"""Plans how many masks each request feeds, as far as the host knows what is pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


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
    length_policy: str = "fixed"
    bypasses_graphs: bool = False


class MaskPlanner(Planner):
    """Plans by a policy of lengths, for one entry per row of the page table.

    Attributes:
        max_predicted: N host integers; the request's k.
        thresholds: N host numbers; tau, 0 for static k.
        emits_only_confirmed: N host flags; see `StepCounts`.
    """

    def __init__(self, config: MTPConfig, num_rows: int, policy: LengthPolicy) -> None:
        self._config = config
        self.policy = policy
        self.max_predicted = [1] * num_rows
        self.thresholds = [0.0] * num_rows
        self.emits_only_confirmed = [True] * num_rows
        self._kinds: list[Kind | None] = [None] * num_rows
        self._pending_bounds = [1] * num_rows  # most that can be pending after all launched steps
        self._pending_read = [1] * num_rows  # pending after the last step that was read
        self._was_used = [False] * num_rows
        self._num_ended = 0

    def step_width(self, params: SamplingParams) -> StepWidth:
        k = params.num_predicted
        return PLAIN_WIDTH if k == 1 else StepWidth(2 * k - 1, k - 1, k)

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            params = new.params
            self.max_predicted[new.row] = params.num_predicted
            self.thresholds[new.row] = params.mtp_threshold
            self.emits_only_confirmed[new.row] = params.emits_only_confirmed
            self._kinds[new.row] = self._kind(new.row)
            self._pending_read[new.row] = 1
            self._num_ended += self._was_used[new.row]
            self._was_used[new.row] = True

    def _kind(self, row: int) -> Kind | None:
        """None where each step accepts as many tokens as it predicts."""
        is_taken = not self.emits_only_confirmed[row] and self.thresholds[row] == 0
        if is_taken or self.max_predicted[row] == 1:
            return None
        return Kind(self.emits_only_confirmed[row], round(10 * self.thresholds[row]))

    def is_adjustable(self, row: int) -> bool:
        """Tells whether the length policy may choose a smaller k for the row's request."""
        return self._config.limits_unverified or self.emits_only_confirmed[row]

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """See `Planner`; lens are of pending tokens."""
        rows, prompts, config = batch.rows, batch.num_prompt_tokens, self._config
        longest = None if lens is None else max(lens[row] for row in rows)
        pending = [
            self._max_pending(row, num_prompt, longest)
            for row, num_prompt in zip(rows, prompts, strict=True)
        ]
        budget = self._budget(batch, longest)
        limit = config.max_k if budget is None else budget.limit
        predicted = [
            self._num_predicted(row, limit) if emits else 0
            for row, emits in zip(rows, batch.emits, strict=True)
        ]
        for row, k in zip(rows, predicted, strict=True):
            if k:
                self._pending_bounds[row] = k
        counts = StepCounts.plain(batch)
        if max(predicted) > 1 or max(pending) > 1:
            counts = self._counts(batch, predicted, pending)
            if config.packs_rows and budget is not None and budget.num_rows is not None:
                size = self._packed_size(batch, counts, pending, budget.num_rows)
                counts = replace(counts, packed=size)
        flags = zip(predicted, pending, counts.emits_only_confirmed, strict=True)
        return StepPlan(
            counts=counts,
            max_pending=max(pending),
            max_accepted=max(1, *(bound if confirmed else k for k, bound, confirmed in flags)),
            lookahead_token=config.mask_token_id,
            wants_probs=not counts.is_plain and any(self.thresholds[row] > 0 for row in rows),
            accepts_unconfirmed=not all(counts.emits_only_confirmed),
            draft_length=0 if budget is None else limit,
            budget=budget,
        )

    def _budget(self, batch: ScheduleBatch, longest_pending: int | None) -> Budget | None:
        """Asks the policy, which hears of steps in which a request looks ahead whose length it may
        choose.

        Args:
            longest_pending: the most pending tokens that a request has; None if that is not known.
        """
        if not any(
            emits and self.max_predicted[row] > 1 and self.is_adjustable(row)
            for row, emits in zip(batch.rows, batch.emits, strict=True)
        ):
            return None
        emitting = Counter[tuple[Kind | None, int, bool, int]]()
        for row, num_prompt, emits in zip(
            batch.rows, batch.num_prompt_tokens, batch.emits, strict=True
        ):
            if emits:
                pending = 0 if num_prompt else self._max_pending(row, 0, longest_pending)
                key = self._kinds[row], self.max_predicted[row], self.is_adjustable(row), pending
                emitting[key] += 1
        num_ended, self._num_ended = self._num_ended, 0
        upcoming = UpcomingStep.of(
            batch,
            Counter({EmittingRequest(*key): count for key, count in emitting.items()}),
            num_ended=num_ended,
            is_packed=self._config.packs_rows,
        )
        return self.policy.choose(upcoming)

    def _max_pending(self, row: int, num_prompt: int, longest_pending: int | None) -> int:
        """Tokens that can be pending at most, 1 where a prompt is fed."""
        bound = 1 if num_prompt else self._pending_bounds[row]
        return bound if longest_pending is None else min(bound, longest_pending)

    def _num_predicted(self, row: int, limit: int) -> int:
        """Tokens that a request predicts in a step that emits some of it."""
        k = self.max_predicted[row]
        return min(k, limit) if self.is_adjustable(row) else k

    def _counts(self, batch: ScheduleBatch, predicted: list[int], pending: list[int]) -> StepCounts:
        confirms = [self.emits_only_confirmed[row] for row in batch.rows]
        counts = StepCounts([], [], predicted, confirms)
        for k, bound, num_prompt, is_confirmed in zip(
            predicted, pending, batch.num_prompt_tokens, confirms, strict=True
        ):
            q_len = (num_prompt or bound) + max(k - 1, 0)
            counts.q_lens.append(q_len)
            counts.num_read.append(q_len if is_confirmed and not num_prompt else k)
        return counts

    def _packed_size(
        self, batch: ScheduleBatch, counts: StepCounts, pending: list[int], num_rows: int
    ) -> PackedSize:
        """Room of a step that the device divides; `num_rows` as in `Budget`."""
        fixed_rows = fixed_reads = num_spare = most = num_cut = 0
        for i, num_prompt in enumerate(batch.num_prompt_tokens):
            looks_ahead = not num_prompt and self.max_predicted[batch.rows[i]] > 1
            if looks_ahead and counts.emits_only_confirmed[i]:
                num_cut += 1
                most += counts.q_lens[i]
                continue
            fixed_rows += counts.q_lens[i]
            fixed_reads += counts.num_read[i]
            # Unverified requests may have fewer pending tokens than the host expects.
            num_spare += 0 if num_prompt else pending[i] - 1
        given = min(most, max(num_rows, num_cut))
        return PackedSize(fixed_rows + given, fixed_reads + min(most, given + num_spare))

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """See `Planner`. A request that emits only what is confirmed has the drafts that the step
        before left it, of which a packed step may feed fewer. With a threshold those count that
        were predicted: that some were not sure enough is part of its kind. Nothing is learnt of one
        that emits nothing or sat the step out."""
        num_tried, num_drafts = list[int](), result.num_drafts
        for i, (row, taken) in enumerate(zip(record.rows, result.accept_lens, strict=True)):
            tried = predicted = record.plan.counts.num_predicted[i]
            if predicted and self.emits_only_confirmed[row]:
                tried = max(self._pending_read[row], taken)
                self._pending_read[row] = predicted if taken == tried else 1
                if taken == 0:
                    tried = 0
                elif self.thresholds[row] == 0:
                    tried = 1 + (num_drafts[i] if num_drafts else 0)
            num_tried.append(tried)
        outcome = StepOutcome(
            plan=record.plan,
            rows=record.rows,
            num_tried=num_tried,
            num_accepted=result.accept_lens,
            num_tokens=sum(result.accept_lens),
            kinds=[self._kinds[row] for row in record.rows],
            is_adjustable=[self.is_adjustable(row) for row in record.rows],
        )
        self.policy.observe(outcome)
