"""Holds how far each request looks ahead, as far as the host knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.lookahead.upcoming_step import Accepted, EmittingRequest, UpcomingStep
from sglang.srt.step.price_table import PromptChunk
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


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


class LookaheadRows:
    """One entry per row of the request-to-token table.

    Attributes:
        max_predicted: N host integers; the request's k.
        thresholds: N host numbers; tau, 0 for static k.
        emits_only_confirmed: N host flags; see `StepCounts`.

    Args:
        limits_all: the length policy may choose a smaller k for unverified requests, too.
    """

    def __init__(self, num_rows: int, limits_all: bool = False) -> None:
        self._limits_all = limits_all
        self.max_predicted = [1] * num_rows
        self.thresholds = [0.0] * num_rows
        self.emits_only_confirmed = [True] * num_rows
        self._kinds: list[Kind | None] = [None] * num_rows
        self._pending_bounds = [1] * num_rows  # most that can be pending after all launched steps
        self._pending_read = [1] * num_rows  # pending after the last step that was read
        self._was_used = [False] * num_rows
        self._num_ended = 0

    def initialize(self, new_rows: list[NewRow]) -> None:
        """Sets the state of requests that have just got a row."""
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
        return self._limits_all or self.emits_only_confirmed[row]

    def upcoming_step(
        self,
        batch: ScheduleBatch,
        longest_pending: int | None,
        is_packed: bool,
    ) -> UpcomingStep:
        """Returns what the length policy gets to see of a step; `longest_pending` as for `plan`,
        the rest as there."""
        emitting: Counter[tuple[Kind | None, int, bool, int]] = Counter()
        kv_tokens = prompt_reqs = 0
        prompts = list[PromptChunk]()
        for i, row in enumerate(batch.rows):
            num_prompt = batch.num_prompt_tokens[i]
            kv_len = batch.kv_lens_before[i]
            if num_prompt:
                prompts.append(PromptChunk(kv_len, num_prompt))
            if not batch.emits[i]:
                prompt_reqs += 1
                continue
            kv_tokens += kv_len + num_prompt
            pending = self._max_pending(row, num_prompt, longest_pending) if num_prompt == 0 else 0
            key = self._kinds[row], self.max_predicted[row], self.is_adjustable(row), pending
            emitting[key] += 1
        num_ended, self._num_ended = self._num_ended, 0
        return UpcomingStep(
            emitting=Counter({EmittingRequest(*key): count for key, count in emitting.items()}),
            kv_tokens=kv_tokens,
            prompt_rows=sum(batch.num_prompt_tokens),
            longest_prompt=max(batch.num_prompt_tokens),
            prompt_reqs=prompt_reqs,
            prompts=tuple(prompts),
            num_ended=num_ended,
            is_packed=is_packed,
        )

    def _max_pending(self, row: int, num_prompt: int, longest_pending: int | None) -> int:
        """Tokens that can be pending at most."""
        bound = 1 if num_prompt else self._pending_bounds[row]
        return bound if longest_pending is None else min(bound, longest_pending)

    def accepted(self, record: StepRecord, result: HostResult) -> list[Accepted]:
        """Returns what a step's requests accepted, of those that emit. Called for every step, in
        order: a request that emits only what is confirmed has the drafts that the step before left
        it, of which a packed step may feed fewer. With a threshold those count that were predicted:
        that some were not sure enough is part of its kind. One that sat the step out is left out.
        """
        found, num_drafts = [], result.num_drafts
        for i, (row, taken) in enumerate(zip(record.rows, result.accept_lens, strict=True)):
            tried = predicted = record.plan.counts.num_predicted[i]
            if predicted == 0:
                continue
            if self.emits_only_confirmed[row]:
                tried = max(self._pending_read[row], taken)
                self._pending_read[row] = predicted if taken == tried else 1
                if taken == 0:
                    continue
                if self.thresholds[row] == 0:
                    tried = 1 + (num_drafts[i] if num_drafts else 0)
            found.append(Accepted(self._kinds[row], self.is_adjustable(row), tried, taken, row))
        return found

    def plan(self, batch: ScheduleBatch, limit: int, longest_pending: int | None) -> LookaheadPlan:
        """Plans what the next step feeds and reads.

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
