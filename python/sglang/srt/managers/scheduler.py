"""The scheduler: takes messages in and runs one of two event loops.

What a step feeds is decided in `scheduling/`, and whether steps may be launched in `control/`.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.constrained.grammar_sessions import GrammarSession, GrammarSessions
from sglang.srt.control.control import Control, ModelResources
from sglang.srt.control.decode_log import DecodeLog
from sglang.srt.control.internal_state import SchedulerStats
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.mem_cache.kv_audit import ReleaseReport
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.messages.control import DEFAULT_WEIGHT_VERSION
from sglang.srt.messages.requests import FinishReason, TokenizedGenerateReqInput
from sglang.srt.observability.request_step import RequestStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.batch_planner import BatchPlanner, MustDrain, PlannerConfig
from sglang.srt.scheduling.batch_result_processor import BatchResultProcessor
from sglang.srt.scheduling.grammar_constraint import with_constraint
from sglang.srt.scheduling.hidden_file import FileWriter, HiddenFile
from sglang.srt.scheduling.invariants import InvariantChecker
from sglang.srt.scheduling.request import LaunchedStep, Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import NewTokenRatio, order_by_priority
from sglang.srt.scheduling.step_builder import PlannedStep
from sglang.srt.scheduling.step_times import StepTimes
from sglang.srt.step.worker import HostResult, Worker
from sglang.srt.tokenizer import StopFinder

logger = logging.getLogger(__name__)

PAUSE_BEFORE_CHECK_S = 0.1  # clients in a closed loop send their next request before
FILE_WAIT_S = 0.002  # for a file, before messages are looked at
QUEUE_FULL_MESSAGE = "The request queue is full; try again later."


class Inbox(Protocol):
    """The place where messages of the front end arrive."""

    def drain(self) -> Iterable[Any]:
        """The messages that are there now."""

    def wait(self, timeout_s: float | None) -> bool:
        """Tells whether a message is there, waiting for it up to the time (None: no limit)."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The settings of the scheduler.

    Attributes:
        max_queued_requests: never admitted requests that may wait; None for any number.
        eos_token_ids: ids that end an output unless the request ignores them.
        strict_invariants: check the ledger after every step and raise on a violation.
        low_priority_first: smaller priorities go first.
        refuses_while_stopped: requests that arrive during a pause get 503 instead of waiting.
        num_draft_steps, num_tree_tokens, draft_tiers, drafters: see `SchedulerStats`.
        random_seed: begins the sequence of seeds for requests that bring none; None draws one.
        decode_log_interval: see `DecodeLog`.
        weight_version: label of the weights at first.
    """

    planner: PlannerConfig
    max_queued_requests: int | None
    schedule_conservativeness: float
    eos_token_ids: frozenset[int]
    enable_overlap: bool
    strict_invariants: bool
    random_seed: int | None
    stream_interval: int = 1
    low_priority_first: bool = False
    refuses_while_stopped: bool = False
    num_draft_steps: int = 0
    num_tree_tokens: int = 0
    draft_tiers: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    decode_log_interval: int | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION


@dataclass(frozen=True, kw_only=True)
class SchedulerDebug:
    """Debug switches.

    Attributes:
        on_step_read: is told what became of the requests of each step, in the order of launches;
            requests that had ended before are left out.
        release_audit: is told what became of a request's KV slots.
        logs_idle_ledger: log the ledger's check whenever the scheduler goes idle.
    """

    on_step_read: Callable[[Sequence[RequestStep], HostResult], None] | None = None
    release_audit: Callable[[ReleaseReport], None] | None = None
    logs_idle_ledger: bool = False


NO_DEBUG = SchedulerDebug()


class Scheduler:
    """Turns requests into steps and steps into tokens.

    Args:
        resources: what control calls change: weights, memory.
        make_stop_finder: makes what looks for a request's stop strings, also given its prompt.
        debug: what watches steps and releases of KV.
        budget: prompt tokens of each step; None for `PlannerConfig.chunked_prefill_size`.
        to_detokenizer, to_frontend: send one message.
        clock: seconds, for deadlines of control calls and times of steps.
        grammars: of requests that have one; None: no request has.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        worker: Worker,
        *,
        ledger: KVLedger,
        resources: ModelResources,
        inbox: Inbox,
        to_detokenizer: Callable[[Any], None],
        to_frontend: Callable[[Any], None],
        make_stop_finder: Callable[[SamplingParams, list[int]], StopFinder],
        debug: SchedulerDebug = NO_DEBUG,
        budget: PromptBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarSessions | None = None,
    ) -> None:
        self._config = config
        self._worker = worker
        self._inbox = inbox
        self._make_stop_finder = make_stop_finder
        self._grammars = grammars
        self._arrivals = itertools.count()
        self._seeds = SeedSource(config.random_seed)
        self._file_writer = FileWriter()
        self.stats = SchedulerStats(
            config.num_draft_steps,
            config.num_tree_tokens,
            config.draft_tiers,
            clock,
            config.drafters,
        )
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.lifecycle = RequestLifecycle(
            ledger, debug.release_audit, config.weight_version, clock=clock
        )
        self.checker = InvariantChecker(
            self.lifecycle, config.strict_invariants, debug.logs_idle_ledger
        )
        self.processor = BatchResultProcessor(
            self.lifecycle, to_detokenizer, config.stream_interval, debug.on_step_read
        )
        self._planner = BatchPlanner(config.planner, self.lifecycle, self.ratio, budget)
        self._step_times = StepTimes(clock)
        self._decode_log = DecodeLog(
            self.lifecycle, self.processor, self.stats, config.decode_log_interval, clock
        )
        self.control = Control(
            lifecycle=self.lifecycle,
            processor=self.processor,
            checker=self.checker,
            ratio=self.ratio,
            stats=self.stats,
            resources=resources,
            reply=to_frontend,
            ping=to_detokenizer,
            clock=clock,
        )

    def run(self) -> None:
        """Serves until the process is told to end."""
        keep_out_of_collections()
        event_loop = (
            self.event_loop_overlap if self._config.enable_overlap else self.event_loop_normal
        )
        ongoing: LaunchedStep | None = None
        while True:
            if ongoing is None and not self.control.has_work:
                self._wait_for_message()
            ongoing = event_loop(ongoing)

    def event_loop_overlap(self, last: LaunchedStep | None) -> LaunchedStep | None:
        """Launches the next step, then reads the last one while it runs."""
        self.receive()
        ongoing = self._launch_next(last)
        if last is not None:
            took_s = self._step_times.wait_for(last.result)
            if took_s is not None and last.price_ms is not None:
                self._planner.observe(last.price_ms, took_s * 1e3)
            self._read(last)
        elif ongoing is not None and ongoing.result.is_ready:
            # Nothing was in flight: a first token need not wait for a second step.
            self._read(ongoing)
            ongoing = self._launch_next(None)
        if ongoing is None:
            self._step_times.forget()
            self.control.between_steps()
        return ongoing

    def event_loop_normal(self, last: LaunchedStep | None = None) -> None:
        """Launches a step and reads it."""
        self.receive()
        step = self._launch_next(None)
        if step is not None:
            self._read(step)
        self.control.between_steps()

    def receive(self) -> None:
        """Handles every message that has arrived."""
        for message in self._inbox.drain():
            if isinstance(message, TokenizedGenerateReqInput):
                self._add_request(message)
            else:
                self.control.handlers[type(message)](message)
        self.control.tick()
        self.processor.flush()

    def _launch_next(self, last: LaunchedStep | None) -> LaunchedStep | None:
        """Launches a step, if there is one, after the one in flight."""
        planned = self._plan(has_inflight=last is not None)
        self._refuse_surplus()
        return None if planned is None else self._launch(with_constraint(planned, last))

    def _plan(self, has_inflight: bool) -> PlannedStep | None:
        """The next step; None if there is none, or if the one in flight must be read first."""
        if not self.control.may_launch:
            return None
        try:
            return self._planner.next_step(has_inflight, admits=self.control.state.admits)
        except MustDrain:
            return None

    def _launch(self, planned: PlannedStep) -> LaunchedStep:
        for row in planned.rows:
            req = row.req
            req.committed_bound += row.max_kept
            req.num_inflight += 1
            req.num_inflight_emits += row.emits
            req.num_scored += len(row.scored)
            req.row_is_new = False
        result = self._worker.forward_batch_generation(planned.batch)
        self.stats.on_launch(planned.rows)
        return LaunchedStep(planned.rows, result, planned.price_ms)

    def _read(self, step: LaunchedStep) -> None:
        had_ended = [row.req.finish_reason is not None for row in step.rows]
        result = self.processor.process(step)
        self._worker.observe(result)
        self.stats.on_read(
            step.rows,
            result.accept_lens,
            result.num_drafts,
            tier=result.draft_length,
            makers=result.makers,
            had_ended=had_ended,
            num_generated=self.processor.num_generated,
        )
        self._decode_log.after_step(step.rows)
        self.checker.after_step("result read")

    def _add_request(self, message: TokenizedGenerateReqInput) -> None:
        params = message.sampling_params
        stop_ids = frozenset(params.stop_token_ids or ())
        if params.ends_at_eos:
            stop_ids |= self._config.eos_token_ids
        req = Req(
            req_id=message.req_id,
            rid=message.rid,
            input_ids=message.input_ids,
            params=params,
            width=self._worker.step_width(params),
            seed=self._seeds.next() if params.sampling_seed is None else params.sampling_seed,
            arrival=next(self._arrivals),
            namespace=message.namespace,
            streams=message.streams,
            priority=-message.priority if self._config.low_priority_first else message.priority,
            logprobs=message.logprobs,
            hidden_states=message.hidden_states,
            hidden_file=HiddenFile.of(message.hidden_file, self._file_writer),
            stop_token_ids=stop_ids,
            stop_finder=(
                self._make_stop_finder(params, message.input_ids) if params.has_stop_texts else None
            ),
            grammar=self._open_grammar(params),
        )
        self.lifecycle.submit(req)
        if self._config.refuses_while_stopped and self.control.state.stopped:
            self._refuse(req, f"{self.control.state.stopped} Try again later.")

    def _open_grammar(self, params: SamplingParams) -> GrammarSession | None:
        if params.grammar is None or self._grammars is None:
            return None
        return self._grammars.open(params.grammar)

    def _refuse_surplus(self) -> None:
        """Ends the requests that would be the last to run with 503, if more wait than may. Those
        that have run before are neither counted nor refused, and those for whom there is a place
        among the running ones do not wait: the step's prompt tokens were used up."""
        limit = self._config.max_queued_requests
        if limit is None or len(self.lifecycle.waiting) <= limit:
            return
        fresh = [req for req in self.lifecycle.waiting if not req.was_admitted]
        num_places = self._planner.num_places() if self.control.state.admits else 0
        if len(fresh) <= limit + num_places:
            return
        if self._config.planner.preemption_threshold is not None:
            fresh = order_by_priority(fresh)
        for req in fresh[limit + num_places :]:
            self._refuse(req, QUEUE_FULL_MESSAGE)
        self.processor.flush()

    def _refuse(self, req: Req, message: str) -> None:
        reason = FinishReason(
            type="abort", message=message, status_code=503, err_type="ServiceUnavailable"
        )
        self.processor.end(req, reason)

    def _wait_for_message(self) -> None:
        """Looks at every slot only when no message has come for a while: it would have to wait."""
        if not self.processor.wait_for_files(FILE_WAIT_S):
            return  # the disk is slow: messages are looked at meanwhile
        self.checker.when_idle(has_time=False)
        self.stats.on_idle()
        self._decode_log.on_idle()
        wait_s = self.control.wait_s
        pause_s = PAUSE_BEFORE_CHECK_S if wait_s is None else min(wait_s, PAUSE_BEFORE_CHECK_S)
        if self._inbox.wait(pause_s) or pause_s < PAUSE_BEFORE_CHECK_S:
            return
        self.checker.when_idle()
        self._inbox.wait(self.control.wait_s)


class SeedSource:
    """Seeds for requests that bring none; repeatable if the server was given a seed."""

    def __init__(self, seed: int | None) -> None:
        self._state = secrets.randbits(63) if seed is None else seed

    def next(self) -> int:
        """A fresh int64 seed (Weyl sequence)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % (1 << 63)
        return self._state
