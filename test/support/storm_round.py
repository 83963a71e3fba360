"""One round of the storm: what happens, and what must be true at its end."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from drafter_checks import DraftCounter, make_drafter_runners
from jumping_tier import JumpingTier
from sglang.srt.control import weight_control
from sglang.srt.managers.scheduler import SchedulerDebug
from sglang.srt.mem_cache.kv_audit import ReleaseReport
from sglang.srt.messages.control import EngineStatus
from sglang.srt.messages.requests import BatchTokenIDOutput
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import check_kv, make_worker
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.request import Req
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import StopFinder, Tokenizer
from sglang.srt.workers.tp_worker import TpModelWorker
from storm_checks import Job, StormFailure, check_request, require
from storm_control import WEIGHT_CALLS, Call, ControlMaker, WeightHistory
from storm_grammars import CountedGrammars
from storm_oracle import MASK, TEXTS, VOCAB_SIZE, Stretch, text_of
from storm_parts import (
    Checkpoints,
    DraftedModels,
    LaterExecutor,
    LateWorker,
    RandomLengths,
    TinyModels,
)
from storm_requests import RequestMaker
from thread_ranks import AtWork, EqualSteps, RunnersOfRanks, put_to_work, runners_of
from token_table_check import TokenTableCheck
from utils import (
    MTP_MAX_K,
    MTP_MAX_ROWS,
    Collected,
    RandomBudget,
    SchedulerHarness,
    Setup,
    make_execution,
    make_mtp_worker,
)

MAX_TURNS, MAX_TURNS_TO_END = 500, 20_000
CONTEXT_LENS = (60, 200)
HEAD_SHARE = 0.3  # of rounds
CROWDS = (150, 300, 600)  # requests of a round
SWAP_SHARE = 0.3  # of turns, where heads are swapped
TOKENIZER = Tokenizer(
    lambda text, special: [],
    text_of,
    frozenset(),
    token_of=lambda token_id: TEXTS[token_id].decode("latin-1"),  # as byte-level vocabularies do
)


class Parts(NamedTuple):
    """Holds what a round serves with; `max_k` is the most tokens that a request may predict by
    masks."""

    max_k: int
    setup: Setup
    group: RunnerGroup
    at_work: AtWork


def has_head(seed: int) -> bool:
    """Tells whether the round of a seed has a draft head."""
    return random.Random(f"head {seed}").random() < HEAD_SHARE


class Asleep(Exception):
    """The scheduler waits for a message, for ever."""


class Round(SchedulerHarness):
    """One seeded program of requests and calls against one scheduler.

    Args:
        swaps_heads: the weights of heads change meanwhile.
        is_crowd: steps have up to 64 requests of some hundred, instead of 8 of 30.
    """

    def __init__(
        self, seed: int, models: TinyModels, swaps_heads: bool = False, is_crowd: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self._crowd = random.Random(f"crowd {seed}") if is_crowd else None
        self._heads: list[bytes] = []
        self._equal: EqualSteps | None = None
        self._swaps = random.Random(f"swaps {seed}") if swaps_heads else None
        self._audits: list[ReleaseReport] = []
        choose = self.random.choice
        self.confirmed: Counter[str] = Counter()
        checkpoints: Checkpoints = models.drafted if has_head(seed) else models
        self._num_ranks = models.num_ranks
        if has_head(seed):
            max_k, setup, group, at_work = self._with_head(models.drafted)
        else:
            max_k, setup, group, at_work = self._without_head(models)
        self._group, worker = group, at_work.first
        setup.num_pages = group.memory.num_pages
        max_rows = setup.max_decode_rows
        check = TokenTableCheck(worker, has_head(seed), at_work.steps)
        self._executor = LaterExecutor()
        self.grammars = CountedGrammars(VOCAB_SIZE)
        with mock.patch.object(weight_control, "ThreadPoolExecutor", return_value=self._executor):
            super().__init__(
                setup,
                LateWorker(check, self.random),
                debug=SchedulerDebug(
                    on_step_read=check.on_step_read, release_audit=self._audits.append
                ),
                resources=at_work.resources,
                make_stop_finder=_make_stop_finder,
                grammars=self.grammars,  # type: ignore[arg-type]
            )
        check.lifecycle = self.scheduler.lifecycle
        self.worker = worker
        self.calls: dict[int, Call] = {}
        self.jobs: dict[int, Job] = {}
        self.history = WeightHistory(checkpoints.dense)
        self.inbox.wait = self._wait  # type: ignore[method-assign]
        self._retract = self.scheduler.lifecycle.retract
        self.scheduler.lifecycle.retract = self._on_retract  # type: ignore[method-assign]
        limit = min(setup.context_len, setup.num_pages * setup.page_size - max_rows)
        edges = [setup.page_size, setup.chunked_prefill_size]
        self._requests = RequestMaker(self.random, limit, edges, max_k)
        rates = ControlMaker.draw_rates(self.random)
        if has_head(seed):
            rates["abort"] = choose([rates["abort"], 20.0])
        self._control = ControlMaker(self.random, checkpoints.weights, rates)
        self._num_turns = choose([20, 60])
        self._num_requests = choose([8, 15, 30])
        self._most_at_once = choose([1, 3, 10, 100])
        self._arrival_rate = choose([0.1, 0.3, 0.9])
        self._haste = choose([0.1, 0.5, 1.0])
        if self._crowd is not None:
            self._num_requests = self._crowd.choice(CROWDS)
            self._most_at_once = 2 * setup.max_running_requests
            self._arrival_rate = self._crowd.choice([0.9, 0.97])
            self._haste = self._crowd.choice([0.02, 0.1])

    def _without_head(self, models: Checkpoints) -> Parts:
        choose = self.random.choice
        max_k = choose([1, *[MTP_MAX_K] * 5])
        max_rows = 1 if max_k == 1 else MTP_MAX_ROWS
        setup = self._draw_setup(max_rows)
        policy, options = None, dict[str, bool]()
        if max_k > 1:
            policy = choose([None, RandomLengths(self.random)])
            options = choose([{}, {"trims_rows": True}])

        def make(group: RunnerGroup) -> TpModelWorker:
            runner = group.target
            if max_k == 1:
                rows = RequestRows(runner.req_to_token_pool, 1, VOCAB_SIZE)
                worker = TpModelWorker(runner, rows, (MASK,))
            else:
                worker = make_mtp_worker(runner, MASK, policy, **options)
            check_kv(group, worker._state)
            return worker

        execution = make_execution(models.path, setup, setup.context_len, max_rows)
        group = runners_of(execution, num_ranks=self._num_ranks)
        return Parts(max_k, setup, group, put_to_work(group, make))

    def _with_head(self, models: DraftedModels) -> Parts:
        """Every request's drafts are those of a head; nobody looks ahead by masks."""
        drafter = models.drafter(self.random)
        self._heads = models.heads_for(drafter)
        setup = self._draw_setup(drafter_needs(drafter).max_slots)
        group, setup = make_drafter_runners(models.path, setup, drafter, self._num_ranks)
        counter = DraftCounter()
        self.confirmed = counter.seen
        equal = self._equal = EqualSteps(counter, self._num_ranks > 1)
        at_work = put_to_work(
            group, lambda group: make_worker(group, drafter, on_step=equal, checks_kv=True)
        )
        equal.first = at_work.first._state
        planner: Any = at_work.first._planner
        if isinstance(planner.policy, JumpingTier):
            planner.policy.may_lack = True  # as requests may ask for
        return Parts(1, setup, group, at_work)

    def _draw_setup(self, max_rows: int) -> Setup:
        choose = self.random.choice
        page_size = choose([1, 1, 1, 4, 16, 64])
        num_tokens = max_rows + choose([8, 60, 120, 250, 600, 2000, 2000])
        context_len = self.random.randint(*CONTEXT_LENS)
        splits = choose([True, True, True, True, False])
        chunk = choose([3, 16, 16, 64, 2048]) if splits else context_len
        varies = splits and choose([True, False])
        setup = Setup(
            page_size=page_size,
            num_pages=-(-num_tokens // page_size),
            use_radix_cache=choose([True, True, True, False]),
            max_running_requests=choose([1, 3, 5, 8]),
            max_queued_requests=choose([3, 100, None, None]),
            chunked_prefill_size=chunk,
            splits_prompts=splits,
            make_budget=partial(RandomBudget, min(chunk, 64)) if varies else None,
            schedule_policy=choose(["fcfs", "lpm"]),
            preemption_threshold=choose([None, None, 0, 3]),
            low_priority_first=choose([False, True]),
            retract_interval=choose([0, 0, 0, 0, 1, 3, 8]),
            enable_overlap=choose([True, True, False]),
            eos_token_ids=choose([frozenset(), frozenset({1}), frozenset({1, 6})]),
            refuses_while_stopped=choose([False, False, False, True]),
            stream_interval=choose([1, 1, 4]),
            context_len=context_len,
            max_decode_rows=max_rows,
        )
        if self._crowd is None:
            return setup
        choose = self._crowd.choice
        chunk = choose([64, 256, 2048]) if splits else context_len
        return replace(
            setup,
            num_pages=choose([1000, 4000, 8000]) // page_size,
            max_running_requests=choose([16, 32, 64]),
            max_queued_requests=choose([100, None]),
            chunked_prefill_size=chunk,
            make_budget=partial(RandomBudget, chunk) if varies else None,
            retract_interval=choose([0, 0, 0, 3, 8]),
        )

    # ------------------------------------------------------------ the program

    def run_round(self) -> Counter[str]:
        """Runs it to its end and checks everything; returns what there was to see."""
        planned: list[Call] = []
        for turn in range(MAX_TURNS):
            if turn >= self._num_turns and len(self.jobs) >= self._num_requests:
                break
            self._arrive()
            planned = planned or self._control.calls(self._rids())
            if planned and self.random.random() < self._haste:
                self._send(planned.pop(0))
            if self._swaps is not None and self._heads and self._swaps.random() < SWAP_SHARE:
                self._send(self._control.swap(self._swaps, self._heads))
            if self.random.random() < 0.3:
                self._executor.run_one()
            self.now += self.random.choice([0.0, 0.0, 0.001, 0.1])
            self._turn()
        for call in self._control.last_calls():
            self._send(call)
            self._run_until_asleep()
        return self._check()

    def _run_until_asleep(self) -> None:
        for _ in range(MAX_TURNS_TO_END):
            if not self._turn():
                return
        raise StormFailure(f"not at rest after {MAX_TURNS_TO_END} turns")

    def clock(self) -> float:
        """Time passes while the scheduler works."""
        self.now += self.random.choice([0.0, 0.0, 0.0005])
        return self.now

    def _rids(self) -> dict[int, str]:
        return {req_id: job.request.rid for req_id, job in self.jobs.items()}

    def _arrive(self) -> None:
        num_ended = sum(outcome.num_ends for outcome in self.outputs.values())
        while (
            len(self.jobs) < self._num_requests
            and len(self.jobs) - num_ended < self._most_at_once
            and self.random.random() < self._arrival_rate
        ):
            self._submit()

    def _submit(self) -> None:
        request = self._requests.request(len(self.jobs) + 1)
        self.outputs[request.req_id] = Collected()
        stretch = Stretch(0, 0, self.history.model)
        self.jobs[request.req_id] = Job(request, [stretch], [(self.history.label, 0)])
        self.inbox.messages.append(request)

    def _send(self, call: Call) -> None:
        call_id = getattr(call.message, "call_id", None)
        if call_id is not None:
            self.calls[call_id] = call
        self.inbox.messages.append(call.message)

    def _turn(self) -> bool:
        """One turn of the loop, as `Scheduler.run` has it; False if it would sleep for ever."""
        if self.ongoing is None and not self.scheduler.control.has_work:
            try:
                self.scheduler._wait_for_message()
            except Asleep:
                return False
        self.step()
        return True

    def _wait(self, timeout_s: float | None) -> bool:
        if self.inbox.messages:
            return True
        if timeout_s is None:
            raise Asleep
        self.now += timeout_s
        self._executor.run_one()
        return False

    # ------------------------------------------------------------ what the round must know

    def on_reply(self, message: Any) -> None:
        """Each call has one reply; what it says about weights holds from here on."""
        super().on_reply(message)
        if isinstance(message, EngineStatus):
            return
        call = self.calls[message.call_id]
        require(call.reply is None, f"two replies to {call.message}")
        call.reply = message
        if not isinstance(call.message, WEIGHT_CALLS) or not message.success:
            return
        num_updates = self.history.num_updates
        if not self.history.apply(call.message, call.weights, message):
            return
        for req in self._live():
            job = self.jobs[req.req_id]
            num_outputs = len(req.output_ids)
            job.labels.append((self.history.label, num_outputs))
            if self.history.num_updates > num_updates:
                job.stretches.append(Stretch(num_outputs, req.committed, self.history.model))

    def _live(self) -> list[Req]:
        lifecycle = self.scheduler.lifecycle
        return [*lifecycle.running, *lifecycle.waiting]

    def _on_retract(self, req: Req) -> None:
        self._retract(req)
        stretch = Stretch(len(req.output_ids), 0, self.history.model)
        self.jobs[req.req_id].stretches.append(stretch)

    def _to_detokenizer(self, message: Any) -> None:
        super()._to_detokenizer(message)
        if not isinstance(message, BatchTokenIDOutput):
            self.calls[message.call_id].reply = message
            return
        for output in message.outputs:
            request = self.jobs[output.req_id].request
            reason = output.finish_reason
            interval = request.sampling_params.stream_interval or self.setup.stream_interval
            num_new, num_sent = len(output.token_ids), len(self.outputs[output.req_id].token_ids)
            is_due = num_new == num_sent or num_new >= interval
            require(is_due or reason is not None, "news of a request before they are due")
            if reason is not None and reason.type != "abort":
                self._requests.remember(request, self.outputs[output.req_id].token_ids)

    # ------------------------------------------------------------ checks

    def _check(self) -> Counter[str]:
        require(self.is_idle, "the scheduler sleeps while requests are alive")
        for call in self.calls.values():
            require(call.reply is not None, f"no reply to {call.message}")
        ledger = self.ledger
        require(ledger.num_used_rows == 0, "a row was not given back")
        self._send(flush := self._control.flush_now())
        self._run_until_asleep()
        if isinstance(self._group, RunnersOfRanks):
            self._group.ranks.settle()
        if self._equal is not None:
            self._equal.check()
        require(flush.reply is not None and flush.reply.success, f"no flush at the end: {flush}")
        require(ledger.num_free_tokens == ledger.num_pool_tokens, "the pool is not full again")
        closed = [session.num_closed for session in self.grammars.sessions]
        require(set(closed) <= {1}, f"grammars of ended requests were closed {closed} times")
        lost = [report for report in self._audits if report.missing_from_terminal_release_count]
        require(not lost, f"slots of ended requests are nobody's: {lost}")
        checker = self.scheduler.checker
        require(checker.num_violations == checker.num_repairs == 0, "the ledger was repaired")
        seen: Counter[str] = Counter(turns=self.num_steps, requests=len(self.jobs))
        seen["requests in crowds"] = len(self.jobs) if self._crowd is not None else 0
        self._check_cached()
        for job in self.jobs.values():
            seen += self._check_job(job)
        for call in self.calls.values():
            kind = type(call.message).__name__
            seen[kind] += 1
            seen["refused calls"] += not getattr(call.reply, "success", True)
        seen["grammars"] = len(closed)
        seen["late masks"] = self.grammars.num_late
        seen["masks without those of drafts"] = self.grammars.num_partial
        seen["updates"] = self.history.num_updates
        seen["head swaps"] = self.history.num_swaps
        state = self.scheduler.control.internal_state()
        if self.confirmed:
            seen["rounds with a head"] = 1
            seen["drafts fed"] = self.confirmed["fed"]
            seen["drafts confirmed"] = self.confirmed["confirmed"]
        seen["leases run out"] = state["num_lease_expiries"]
        return seen

    def _check_job(self, job: Job) -> Counter[str]:
        try:
            return check_request(job, self.outputs[job.request.req_id], self.setup.eos_token_ids)
        except AssertionError as error:
            raise StormFailure(f"{error}\n{job.request}\n{job.labels}") from error

    def _check_cached(self) -> None:
        """No more was cached than another request with the same key had computed."""
        known = defaultdict[str | None, list[list[int]]](list)
        requests = [job.request for job in self.jobs.values()]
        for request in requests:
            tokens = self.outputs[request.req_id].token_ids
            known[request.cache_key].append(request.input_ids + tokens)
        for texts in known.values():
            texts.sort()
        for request in requests:
            cached, texts = self.outputs[request.req_id].cached_tokens, known[request.cache_key]
            prefix = request.input_ids[:cached]
            first = bisect_left(texts, prefix)  # texts with this prefix follow each other
            having = [text for text in texts[first : first + 2] if text[:cached] == prefix]
            told = f"{cached} cached tokens, which no other request had: {request}"
            require(cached == 0 or len(having) == 2, told)


def _make_stop_finder(params: SamplingParams, input_ids: list[int]) -> StopFinder:
    stops = StopSet(params.stop_strings, params.stop_regexes)
    return StopFinder(
        TOKENIZER, stops, params.skip_special_tokens, input_ids, params.min_new_tokens
    )
