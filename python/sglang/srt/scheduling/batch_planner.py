"""Builds the next step: decode rows, then prompt chunks, then newcomers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sglang.srt.layers.logit_adjustments import RowAdjustments
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenPlan
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import (
    AdmissionPolicy,
    NewTokenRatio,
    choose_victim,
    order_by_priority,
    order_waiting,
    preemptible,
)
from sglang.srt.step.worker import NewRow, ScheduleBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Sizes and switches of scheduling.

    Attributes:
        preemption_threshold: orders by priority, and lets a waiting request push aside a running
            one whose priority is lower by more than this; None looks at no priorities.
        retract_interval: retract each request when it has emitted in this many steps since its
            admission (a test switch); 0 is never.
        splits_prompts: whether a prompt may be fed in several steps.
    """

    chunked_prefill_size: int
    max_running_requests: int
    schedule_policy: str
    preemption_threshold: int | None = None
    retract_interval: int = 0
    splits_prompts: bool = True


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to launch: what the worker gets, and what the scheduler remembers of it."""

    batch: ScheduleBatch
    rows: list[LaunchedRow]


class MustDrain(Exception):
    """The pool is full, or a retraction is due, and a step in flight must be read first."""


@dataclass(slots=True)
class _StepBuilder:
    """A step while requests are added to it."""

    rows: list[LaunchedRow] = field(default_factory=list)
    _row_indices: list[int] = field(default_factory=list)
    _q_lens: list[int] = field(default_factory=list)
    _host_tokens: list[int] = field(default_factory=list)
    _num_host_tokens: list[int] = field(default_factory=list)
    _kv_bounds: list[int] = field(default_factory=list)
    _new_rows: list[NewRow] = field(default_factory=list)
    _logprobs_and_hidden: LogprobsAndHiddenPlan = field(default_factory=LogprobsAndHiddenPlan)

    def add(self, req: Req, tokens: list[int], q_len: int, max_kept: int, emits: bool) -> None:
        """Adds a request, whose slots are reserved.

        Args:
            tokens: the next tokens of its prompt; none for a decode row.
            q_len: rows that have slots, look-ahead included.
            max_kept: tokens by which the step may move the watermark, at most.
        """
        assert req.kv is not None
        if req.row_is_new:
            self._new_rows.append(_new_row(req, req.kv.row))
            req.row_is_new = False
        num_scored, num_hidden = self._logprobs_and_hidden.add(req, len(tokens), max_kept, emits)
        self._row_indices.append(req.kv.row)
        self._q_lens.append(q_len)
        self._host_tokens.extend(tokens)
        self._num_host_tokens.append(len(tokens))
        self._kv_bounds.append(req.committed_bound + q_len)
        self.rows.append(
            LaunchedRow(req, max_kept, emits, emits and bool(tokens), num_scored, num_hidden)
        )

    def build(self, table_writes: PageTableWrites) -> PlannedStep:
        """The step of all requests added."""
        batch = ScheduleBatch(
            rows=self._row_indices,
            max_q_lens=self._q_lens,
            host_tokens=self._host_tokens,
            num_host_tokens=self._num_host_tokens,
            emits=[row.emits for row in self.rows],
            kv_len_upper_bounds=self._kv_bounds,
            new_rows=self._new_rows,
            table_writes=table_writes,
            all_greedy=all(row.req.params.is_greedy for row in self.rows if row.emits),
            adjusts_logits=any(row.req.params.adjusts_logits for row in self.rows if row.emits),
            logprobs=self._logprobs_and_hidden.logprob_plan(),
            hidden_rows=self._logprobs_and_hidden.hidden_rows,
        )
        return PlannedStep(batch, self.rows)


class BatchPlanner:
    """Decides what the next step feeds. Reads and moves requests through the lifecycle only."""

    def __init__(
        self,
        config: PlannerConfig,
        lifecycle: RequestLifecycle,
        ratio: NewTokenRatio,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._ledger = lifecycle.ledger
        self._ratio = ratio
        self._admission = AdmissionPolicy(lifecycle.ledger, ratio)

    def next_step(self, has_inflight: bool, admits: bool = True) -> PlannedStep | None:
        """The next step, or None when there is nothing to launch.

        Args:
            admits: whether every waiting request may start; if not, only those that must finish.

        Raises:
            MustDrain: when the step in flight has to be read before anything can be planned.
        """
        self._force_retractions(has_inflight)
        if admits:
            self._preempt(has_inflight)
        self._reserve_decodes(has_inflight)
        step = self._collect(admits)
        while not step.rows and not has_inflight and self._lifecycle.running:
            # Half-read prompts have filled the pool: one of them has to make room.
            self._retract_for_room()
            step = self._collect(admits)
        if not step.rows:
            return None
        self._ratio.on_step()
        return step.build(self._ledger.take_table_writes())

    def _collect(self, admits: bool) -> _StepBuilder:
        step = _StepBuilder()
        for req in self._lifecycle.running:
            if not req.is_prefilling and not req.ends_in_flight:
                step.add(req, [], req.width.decode_rows, req.width.max_kept, emits=True)
        budget = self._config.chunked_prefill_size
        for req in self._lifecycle.running:
            if req.is_prefilling and budget > 0:
                budget -= self._add_chunk(step, req, budget)
        self._admit_newcomers(step, budget, admits)
        return step

    def _reserve_decodes(self, has_inflight: bool) -> None:
        """Slots for every decode row; retracts requests while the pool cannot give them."""
        for req in list(self._lifecycle.running):
            if req.is_prefilling or req.ends_in_flight:
                continue
            while req.kv is not None and not self._ledger.reserve(req.kv, self._decode_end(req)):
                if has_inflight:
                    raise MustDrain
                self._retract_for_room()

    def _force_retractions(self, has_inflight: bool) -> None:
        interval = self._config.retract_interval
        if not interval:
            return
        due = [
            req
            for req in self._lifecycle.running
            if req.num_emitted_since_admission + req.num_inflight_emits >= interval
        ]
        if due and has_inflight:
            raise MustDrain
        for req in due:
            self._retract(req)

    def _preempt(self, has_inflight: bool) -> None:
        """Makes room for the first in the queue at the cost of requests of lower priority."""
        threshold, running = self._config.preemption_threshold, self._lifecycle.running
        if threshold is None or not self._lifecycle.waiting:
            return
        first = self._order()[0]
        victims = preemptible(running, first.priority, threshold)
        while not (self.has_room() and self._admission.fits(first, running)):
            if not victims or not self._would_fit_without(victims, first):
                return
            if has_inflight:
                raise MustDrain
            self._retract(victims.pop(0))

    def _would_fit_without(self, victims: list[Req], first: Req) -> bool:
        """Whether retracting all victims can make room. Prefixes that they share with others stay,
        so it may turn out to be too little."""
        others = [req for req in self._lifecycle.running if req not in victims]
        num_pages = sum(len(req.kv.pages) for req in victims if req.kv is not None)
        return self._admission.fits(first, others, num_pages * self._ledger.page_size)

    def _order(self) -> list[Req]:
        if self._config.preemption_threshold is not None:
            return order_by_priority(self._lifecycle.waiting)
        return order_waiting(self._lifecycle.waiting, self._config.schedule_policy, self._ledger)

    def _retract_for_room(self) -> None:
        self._retract(choose_victim(self._lifecycle.running))
        self._ratio.on_retract(self._lifecycle.running)

    def _retract(self, req: Req) -> None:
        logger.debug("Retracting request %s after %d tokens.", req.rid, len(req.output_ids))
        self._lifecycle.retract(req)

    def _admit_newcomers(self, step: _StepBuilder, budget: int, admits: bool) -> None:
        waiting, running = self._lifecycle.waiting, self._lifecycle.running
        if not waiting or not self.has_room(budget):
            return
        for req in self._order():
            if not (admits or req.must_finish):
                continue
            if not self.has_room(budget) or not self._admission.fits(req, running):
                return
            self._lifecycle.admit(req)
            budget -= self._add_chunk(step, req, budget)

    def has_room(self, budget: int = 1) -> bool:
        """Whether one more request could run, as far as rows go, given `budget` prompt tokens."""
        is_full = len(self._lifecycle.running) >= self._config.max_running_requests
        return budget > 0 and not is_full and self._ledger.has_free_row

    def _add_chunk(self, step: _StepBuilder, req: Req, budget: int) -> int:
        """Adds the next prompt tokens of a request, as many as budget and pool allow; returns how
        many."""
        start = req.committed_bound
        end = min(len(req.fill_ids), start + budget)
        assert req.kv is not None
        is_last = end == len(req.fill_ids)
        if not (is_last or self._config.splits_prompts):
            return 0  # it is whole in a step of its own
        lookahead = req.width.lookahead_rows if is_last else 0
        if not self._ledger.reserve(req.kv, end + lookahead):
            return 0
        tokens = req.fill_ids[start:end]
        step.add(req, tokens, len(tokens) + lookahead, len(tokens), emits=is_last)
        return len(tokens)

    def _decode_end(self, req: Req) -> int:
        return req.committed_bound + req.width.decode_rows


def _new_row(req: Req, row: int) -> NewRow:
    adjustments = None
    if req.params.adjusts_logits:
        adjustments = RowAdjustments(
            req.params, list(req.output_ids), len(req.input_ids), sorted(req.stop_token_ids)
        )
    return NewRow(row, req.committed, req.params, req.seed, adjustments)
