"""Builds the next step: decode rows, then prompt chunks, then newcomers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.mem_cache.shared_prefixes import SharedPrefixes
from sglang.srt.scheduling.request import Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import (
    AdmissionPolicy,
    NewTokenRatio,
    choose_victim,
    order_by_priority,
    order_waiting,
    preemptible,
)
from sglang.srt.scheduling.step_builder import PlannedStep, PromptFeed, StepBuilder
from sglang.srt.step.price_table import StepShape

logger = logging.getLogger(__name__)

MAX_PASSED = 8  # waiting prompts that shorter ones may pass in a step: each costs a look-up


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Sizes and switches of scheduling.

    Attributes:
        chunked_prefill_size: prompt tokens in a step, at most.
        max_step_ms: the highest price of a step in which requests decode; 0: no bound.
        bounds_streams_alone: this bound holds only while a running or waiting request streams.
        preemption_threshold: requests are ordered by priority, and a waiting one pushes aside a
            running one whose priority is lower by more than this; None: priorities are ignored.
        retract_interval: each request is retracted when it has emitted in this many steps since its
            admission (a test switch); 0: never.
        splits_prompts: whether a prompt may be fed in several steps.
        finds_shared_kv: steps name the prefixes that their requests share, for attention that gains
            from it.
        has_both_orders: see `ExecutionConfig`; prices are those of the usual orders.
    """

    chunked_prefill_size: int
    max_step_ms: float = 0.0
    bounds_streams_alone: bool = False
    max_running_requests: int
    schedule_policy: str
    preemption_threshold: int | None = None
    retract_interval: int = 0
    splits_prompts: bool = True
    finds_shared_kv: bool = False
    has_both_orders: bool = False


class MustDrain(Exception):
    """The pool is full, or a retraction is due, and a step in flight must be read first."""


class BatchPlanner:
    """Plans the next step. It reads and moves requests only through the lifecycle.

    Args:
        budget: prompt tokens of each step; None for `PlannerConfig.chunked_prefill_size`.
    """

    def __init__(
        self,
        config: PlannerConfig,
        lifecycle: RequestLifecycle,
        ratio: NewTokenRatio,
        budget: PromptBudget | None = None,
    ) -> None:
        self._config = config
        self._budget = budget or PromptBudget(config.chunked_prefill_size)
        self._lifecycle = lifecycle
        self._ledger = lifecycle.ledger
        self._shared_prefixes = SharedPrefixes(lifecycle.ledger)
        self._ratio = ratio
        self._admission = AdmissionPolicy(lifecycle.ledger, ratio)
        self._num_saved = 0

    def next_step(self, has_inflight: bool, admits: bool = True) -> PlannedStep | None:
        """Returns the next step, or None when there is nothing to launch.

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
        while step.is_empty and not has_inflight and self._lifecycle.steppable:
            # Half-read prompts have filled the pool: one of them has to make room.
            self._retract_for_room()
            step = self._collect(admits)
        if step.is_empty:
            return None
        self._ratio.on_step()
        if self._config.finds_shared_kv:
            step.shared_prefixes = self._shared_prefixes.find(step.decoded_kv)
        return step.build(self._ledger.take_table_writes(), self._lifecycle.take_ended_texts())

    def observe(self, price_ms: float, took_ms: float) -> None:
        """Learns the time that a step took, beside its price (`PlannedStep.price_ms`)."""
        self._budget.observe(price_ms, took_ms)

    def _collect(self, admits: bool) -> StepBuilder:
        step = StepBuilder(self._config.has_both_orders)
        decoding, prefilling = list[Req](), list[Req]()
        for req in self._lifecycle.steppable:
            if req.is_prefilling:
                prefilling.append(req)
            elif not req.ends_in_flight:
                decoding.append(req)
                step.add_decode(req)
        if not prefilling and not (self.has_room() and self._lifecycle.startable):
            return step
        allowance = self._budget.open(_decode_load(decoding), self._lifecycle.num_streams > 0)
        feed = PromptFeed(
            step, self._ledger, allowance, self._config.splits_prompts, self._num_saved
        )
        for req in prefilling:
            feed.offer(req)
        self._admit_newcomers(feed, admits)
        feed.finish()
        self._num_saved = feed.num_saved
        step.price_ms = allowance.price_ms
        return step

    def _reserve_decodes(self, has_inflight: bool) -> None:
        """Reserves slots for every decode row; retracts requests while the pool has too few."""
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
        if threshold is None or not self._lifecycle.startable:
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
        """Tells whether retracting all victims can make room. Prefixes that they share with others
        stay, so it may turn out to be too little."""
        others = [req for req in self._lifecycle.running if req not in victims]
        num_pages = sum(len(req.kv.pages) for req in victims if req.kv is not None)
        return self._admission.fits(first, others, num_pages * self._ledger.page_size)

    def _order(self) -> list[Req]:
        startable = self._lifecycle.startable
        if self._config.preemption_threshold is not None:
            return order_by_priority(startable)
        return order_waiting(startable, self._config.schedule_policy, self._ledger)

    def _retract_for_room(self) -> None:
        self._retract(choose_victim(self._lifecycle.running))
        self._ratio.on_retract(self._lifecycle.running)

    def _retract(self, req: Req) -> None:
        logger.debug("Retracting request %s after %d tokens.", req.rid, len(req.output_ids))
        self._lifecycle.retract(req)

    def _admit_newcomers(self, feed: PromptFeed, admits: bool) -> None:
        """Admits waiting requests in their order. While a prompt is read that does not end in the
        step, shorter prompts may pass longer ones, which must wait for it anyway; a row and slots
        stay free for the first of those. No request passes one for which the share is saved."""
        waiting, running = self._lifecycle.startable, self._lifecycle.running
        if not waiting or not self.has_room() or feed.num_for_newcomer == 0:
            return
        num_passed = num_kept = 0
        for req in self._order():
            if not (admits or req.must_finish):
                continue
            most = feed.num_for_newcomer
            if most == 0 or not self.has_room(min(num_passed, 1)):
                return
            num_to_read = 0 if most is None else self._num_to_read(req, most)
            if most is not None and num_to_read > most:
                if feed.saves_for(req, len(req.known_ids) - num_to_read, num_to_read):
                    return
                if num_passed == 0:
                    if not self._admission.fits(req, running):
                        return
                    num_kept = self._admission.needed(req)
                num_passed += 1
                if num_passed > MAX_PASSED:
                    return
                continue
            if not self._admission.fits(req, running, -num_kept):
                return
            self._lifecycle.admit(req)
            feed.offer(req)

    def _num_to_read(self, req: Req, most: int) -> int:
        """Returns the number of tokens that are not in the cache; of a prompt of up to `most`
        tokens that of all, without a look-up."""
        tokens = req.known_ids
        if len(tokens) <= most:
            return len(tokens)
        cacheable = tokens[: req.max_cached_tokens + 1]
        return len(tokens) - self._ledger.cached_prefix(req.namespace, cacheable)[0]

    def has_room(self, num_kept: int = 0) -> bool:
        """Tells whether there is a row for one more request while `num_kept` rows are kept for
        others."""
        is_full = len(self._lifecycle.running) + num_kept >= self._config.max_running_requests
        return not is_full and self._ledger.num_free_rows > num_kept

    def num_places(self) -> int:
        """Returns for how many waiting requests there is a row, now or as soon as the step in
        flight is read; 0 while the first of them finds no room in the pool."""
        waiting, running = self._lifecycle.startable, self._lifecycle.running
        num_places = self._config.max_running_requests - len(running)
        if num_places <= 0 or not waiting:
            return 0
        return num_places if self._admission.fits(self._order()[0], running) else 0

    def _decode_end(self, req: Req) -> int:
        return req.committed_bound + req.width.decode_rows


def _decode_load(decoding: list[Req]) -> StepShape:
    """Adds up the decodes, each with the most rows that it may feed."""
    widest = num_rows = kv_tokens = row_kv = 0
    for req in decoding:
        widest = max(widest, req.width.decode_rows)
        num_rows += req.width.decode_rows
        kv_tokens += req.committed_bound
        row_kv += req.width.decode_rows * req.committed_bound
    return StepShape(len(decoding), widest, num_rows, num_rows, kv_tokens, row_kv)
