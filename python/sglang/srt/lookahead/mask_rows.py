"""Plans how many masks each request feeds, as far as the host knows what is pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, StepPlan, StepRecord
from sglang.srt.lookahead.planner import PlannedRows
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


@dataclass(frozen=True, slots=True)
class LookaheadPlan:
    """The rows that a step feeds and reads, request by request; known before the step before it is
    read.

    Attributes:
        counts: what of it the device must know.
        max_accepted: tokens that can be accepted.
        looks_ahead: whether the request wants to predict more than one token.
        max_pending: tokens that can be pending, 1 where a prompt is fed.
    """

    counts: StepCounts
    max_accepted: list[int]
    looks_ahead: list[bool]
    max_pending: list[int]

    def packed(self, batch: ScheduleBatch, num_rows: int) -> LookaheadPlan:
        """The same with the rows divided by the device; `num_rows` as in `Budget`."""
        counts = self.counts
        fixed_rows = fixed_reads = least_rows = most = num_cut = 0
        for i, num_prompt in enumerate(batch.num_prompt_tokens):
            if num_prompt == 0 and counts.emits_only_confirmed[i] and self.looks_ahead[i]:
                num_cut += 1
                most += counts.q_lens[i]
                continue
            fixed_rows += counts.q_lens[i]
            fixed_reads += counts.num_read[i]
            # Unverified requests may have fewer pending tokens than the host expects.
            num_spare = 0 if num_prompt else self.max_pending[i] - 1
            least_rows += counts.q_lens[i] - num_spare
        given = min(most, max(num_rows, num_cut))
        total = fixed_rows + given
        size = PackedSize(total, fixed_reads + min(most, total - least_rows))
        return replace(self, counts=replace(counts, packed=size))


class MaskRows(PlannedRows["int | None"]):
    """Plans for one entry per row of the request-to-token table. Before a policy chooses it knows
    the most pending tokens that a request of the step has; None if that is not known.

    Attributes:
        max_predicted: N host integers; the request's k.
        thresholds: N host numbers; tau, 0 for static k.
        emits_only_confirmed: N host flags; see `StepCounts`.
    """

    def __init__(self, config: MTPConfig, num_rows: int) -> None:
        self._config = config
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

    def begin(
        self, batch: ScheduleBatch, lens: Sequence[int] | None
    ) -> tuple[int | None, UpcomingStep | None]:
        """See `PlannedRows`; lens are of pending tokens. The policy hears of steps in which a
        request looks ahead whose length it may choose."""
        longest_pending = None if lens is None else max(lens[row] for row in batch.rows)
        if not any(
            emits and self.max_predicted[row] > 1 and self.is_adjustable(row)
            for row, emits in zip(batch.rows, batch.emits, strict=True)
        ):
            return longest_pending, None
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
        return longest_pending, upcoming

    def plan(self, batch: ScheduleBatch, begun: int | None, budget: Budget | None) -> StepPlan:
        config = self._config
        limit = config.max_k if budget is None else budget.limit
        plan = self.rows_fed(batch, limit, begun)
        num_rows = None if budget is None else budget.num_rows
        if config.packs_rows and num_rows is not None and not plan.counts.is_plain:
            plan = plan.packed(batch, num_rows)
        return StepPlan(
            counts=plan.counts,
            max_pending=max(plan.max_pending),
            max_accepted=max(1, *plan.max_accepted),
            lookahead_token=config.mask_token_id,
            wants_probs=not plan.counts.is_plain
            and any(self.thresholds[row] > 0 for row in batch.rows),
            accepts_unconfirmed=not all(plan.counts.emits_only_confirmed),
            draft_length=0 if budget is None else limit,
            budget=budget,
        )

    def _max_pending(self, row: int, num_prompt: int, longest_pending: int | None) -> int:
        """Tokens that can be pending at most."""
        bound = 1 if num_prompt else self._pending_bounds[row]
        return bound if longest_pending is None else min(bound, longest_pending)

    def outcome(self, record: StepRecord, result: HostResult) -> StepOutcome:
        """See `PlannedRows`. A request that emits only what is confirmed has the drafts that the
        step before left it, of which a packed step may feed fewer. With a threshold those count
        that were predicted: that some were not sure enough is part of its kind. Nothing is learnt
        of one that emits nothing or sat the step out."""
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
        return StepOutcome(
            plan=record.plan,
            rows=record.rows,
            num_tried=num_tried,
            num_accepted=result.accept_lens,
            num_tokens=sum(result.accept_lens),
            kinds=[self._kinds[row] for row in record.rows],
            is_adjustable=[self.is_adjustable(row) for row in record.rows],
        )

    def rows_fed(
        self, batch: ScheduleBatch, limit: int, longest_pending: int | None
    ) -> LookaheadPlan:
        """Returns what the next step feeds and reads.

        Args:
            limit: the most tokens that an adjustable request may predict.
            longest_pending: the most pending tokens that a request has; None if that is not known.
        """
        prompts, rows = batch.num_prompt_tokens, batch.rows
        predicted = [
            self._num_predicted(row, limit) if emits else 0
            for row, emits in zip(rows, batch.emits, strict=True)
        ]
        pending = [
            self._max_pending(row, num_prompt, longest_pending)
            for row, num_prompt in zip(rows, prompts, strict=True)
        ]
        looks_ahead = [
            emits and self.max_predicted[row] > 1
            for row, emits in zip(rows, batch.emits, strict=True)
        ]
        for row, k in zip(rows, predicted, strict=True):
            if k:
                self._pending_bounds[row] = k
        if max(predicted) <= 1 and max(pending) == 1:
            return LookaheadPlan(StepCounts.plain(batch), pending, looks_ahead, pending)
        confirms = [self.emits_only_confirmed[row] for row in rows]
        counts, max_accepted = StepCounts([], [], predicted, confirms), list[int]()
        for k, bound, num_prompt, is_confirmed in zip(
            predicted, pending, prompts, confirms, strict=True
        ):
            q_len = (num_prompt or bound) + max(k - 1, 0)
            counts.q_lens.append(q_len)
            counts.num_read.append(q_len if is_confirmed and not num_prompt else k)
            max_accepted.append(bound if is_confirmed else k)
        return LookaheadPlan(counts, max_accepted, looks_ahead, pending)

    def _num_predicted(self, row: int, limit: int) -> int:
        """Tokens that a request predicts in a step that emits some of it."""
        k = self.max_predicted[row]
        return min(k, limit) if self.is_adjustable(row) else k
