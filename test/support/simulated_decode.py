"""A simulated device and a closed loop of clients, for policies of how far to look ahead.

The loop is the scheduler's: a step is planned before the one before it is read, prompts share steps
with decodes, and a request whose end is not known beforehand runs one step too many.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from policy_steps import predicted
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import DECODE, MIXED
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk

MAX_K = 8
UNVERIFIED, VERIFIED = Kind(False, 9), Kind(True, 0)
# Milliseconds of an 8B model's matrix products by rows, as a GPU has them: flat, steep, falling.
STAIRCASE = {1: 5.64, 64: 5.85, 128: 6.12, 192: 6.68, 256: 7.3, 264: 7.86, 288: 9.24, 320: 8.4}
STAIRCASE |= {384: 9.77, 416: 11.5, 448: 14.9, 480: 12.2, 512: 12.4, 576: 13.8, 1024: 24.5}
KV_MS = 5e-5  # of a token of KV
OTHER_MS = 0.7  # of a step
SEVERAL_ROWS_MS, PROMPT_MS = 0.15, 0.45  # more, where requests feed several rows, or prompts


def gpu_prices(max_requests: int = 128) -> PriceTable:
    keys = GraphKeys(GraphSupport.RAGGED_Q, max_requests, 2 * MAX_K - 1, 1024)
    curve = Curve(tuple(STAIRCASE), tuple(STAIRCASE.values()))
    more = {DECODE: 0.0, MIXED: PROMPT_MS}
    return PriceTable(
        find=keys.find_shape,
        graphs_ms={
            key: curve.at(key.num_tokens) + OTHER_MS + more.get(key.tag, SEVERAL_ROWS_MS)
            for key in keys.all
        },
        eager=Curve((1280, 2560), (32.0, 64.0)),
        head=Curve((1, 128, 256, 1024), (0.4, 0.45, 0.6, 1.6)),
        kv_ms=KV_MS,
        row_kv_ms=KV_MS / 50,
        spread=0.004,
    )


@dataclass
class _Request:
    num_prompt: int
    num_left: int
    num_kv: int
    pending_bound: int = 1
    num_drafts: int = 0
    num_inflight: int = 0
    has_ended: bool = False


@dataclass(frozen=True)
class _Launched:
    """A step: each emitting request with the tokens that it could accept, and those that it did."""

    outcomes: list[tuple[_Request, int, int]]
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop.

    Attributes:
        num_clients: requests at once.
        num_requests: in all; the last ones drain.
        num_prompt, num_context: prompt tokens fed, and those that were in the cache.
        num_new: shortest and longest output.
    """

    num_clients: int
    num_requests: int
    num_prompt: int = 128
    num_context: int = 0
    num_new: tuple[int, int] = (64, 192)
    chunk: int = 8192


@dataclass(frozen=True)
class Fixed:
    """A policy of one length."""

    limit: int

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(self.limit)

    def observe(self, outcome: StepOutcome) -> None: ...


class Simulation:
    """One run; `chance` of a token to be accepted, after the one before it, by time in ms."""

    def __init__(
        self,
        prices: PriceTable,
        load: Load,
        policy: LengthPolicy | Fixed,
        kind: Kind = UNVERIFIED,
        chance: Callable[[float], float] = lambda now_ms: 0.0,
        seed: int = 0,
        surcharge: float = 0.0,
    ) -> None:
        self._prices = prices
        self._load = load
        self._policy = policy
        self._kind = kind
        self._chance = chance
        self._surcharge = surcharge
        self._lengths = random.Random(seed)
        self._luck = random.Random(seed + 1)
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._num_started = 0
        self.now_ms = 0.0
        self.limits: Counter[int] = Counter()

    def run(self) -> float:
        """Milliseconds until all is done."""
        for _ in range(self._load.num_clients):
            self._arrive()
        inflight = _Launched([], 0)
        while self._running or self._waiting or inflight.outcomes:
            ongoing = self._launch()
            self._read(inflight)
            inflight = ongoing
        return self.now_ms

    def _arrive(self) -> None:
        if self._num_started < self._load.num_requests:
            self._num_started += 1
            load = self._load
            num_new = self._lengths.randint(*load.num_new)
            self._waiting.append(_Request(load.num_prompt, num_new, load.num_context))

    def _launch(self) -> _Launched:
        emitting = [
            (request, request.pending_bound)
            for request in self._running
            if request.num_prompt == 0 and request.num_inflight < request.num_left
        ]
        chunks, num_reading = list[int](), 0
        room = self._load.num_clients - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        for request in self._running:
            count = min(request.num_prompt, self._load.chunk - sum(chunks))
            if count == 0:
                continue
            chunks.append(count)
            request.num_prompt -= count
            request.num_kv += count
            if request.num_prompt:
                num_reading += 1
            else:
                emitting.append((request, 0))
        if not emitting and not chunks:
            return _Launched([], 0)
        return self._step(emitting, chunks, num_reading)

    def _step(
        self, emitting: list[tuple[_Request, int]], chunks: list[int], num_reading: int
    ) -> _Launched:
        upcoming = UpcomingStep(
            emitting=Counter(
                EmittingRequest(self._kind, MAX_K, True, pending) for _, pending in emitting
            ),
            kv_tokens=sum(request.num_kv for request, _ in emitting),
            prompt_reqs=num_reading,
            prompts=tuple(PromptChunk(0, count) for count in chunks),
        )
        budget = Budget(1)
        if emitting:
            budget = self._policy.choose(upcoming)
            self.limits[budget.limit] += 1
        limit = budget.limit
        cost_ms = self._prices.price_ms(upcoming.current_shape(limit))
        looks_ahead = limit > 1 or any(pending > 1 for _, pending in emitting)
        self.now_ms += cost_ms * (1 + self._surcharge * looks_ahead)
        outcomes = [(request, *self._accept(request, limit)) for request, _ in emitting]
        return _Launched(outcomes, budget)

    def _accept(self, request: _Request, limit: int) -> tuple[int, int]:
        """Tokens that could be accepted, and those that were."""
        request.pending_bound = limit
        request.num_inflight += 1
        chance = self._chance(self.now_ms)
        tried = request.num_drafts + 1 if self._kind.emits_only_confirmed else limit
        taken = 1
        while taken < tried and self._luck.random() < chance:
            taken += 1
        request.num_drafts = limit - 1 if taken == tried else 0
        return tried, taken

    def _read(self, step: _Launched) -> None:
        outcomes = step.outcomes
        for request, _, taken in outcomes:
            request.num_inflight -= 1
            if request.has_ended:
                continue
            request.num_left -= min(taken, request.num_left)
            request.num_kv += taken
            if request.num_left == 0:
                request.has_ended = True
                self._running.remove(request)
                self._arrive()
        if outcomes:
            pairs = [(tried, taken) for _, tried, taken in outcomes]
            self._policy.observe(predicted(step.budget, self._kind, pairs))


@functools.cache
def plain_ms(prices: Callable[[], PriceTable], load: Load) -> float:
    return Simulation(prices(), load, Fixed(1)).run()
