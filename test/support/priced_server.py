"""A simulated server: the scheduler, a worker whose steps take what prices say on a clock of its
own, and clients that send requests at given times or when an answer is there."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import DECODE, MIXED
from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.messages.requests import BatchTokenIDOutput
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, StepShape
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, ScheduleBatch
from utils import SchedulerHarness, Setup

MAX_RUNNING = 128
MAX_CHUNK = 8192
HOST_S = 0.0004  # to plan and launch a step, and as long to read it
CLIENT_S = 0.002  # from a token to the client, and from there to the next request
# Milliseconds of an 8B model's steps on one H100 80GB by rows.
STEP_MS = {
    1: 5.4, 64: 5.7, 128: 6.6, 192: 7.3, 256: 7.8, 288: 9.5, 320: 9.0, 384: 9.8, 448: 15.7,
    512: 11.2, 576: 13.6, 640: 14.3, 704: 17.1, 768: 17.5, 832: 22.5, 896: 21.9, 960: 22.0,
    1024: 22.2, 1152: 24.5, 1280: 25.4, 1408: 31.2, 1536: 33.6, 1664: 38.0, 1792: 37.3,
    2048: 42.1, 2560: 51.3, 4096: 83.4, 8192: 178.0,
}  # fmt: skip
READ_MS = {1: 0.45, 64: 0.51, 128: 0.6, 256: 0.77, 512: 1.36, 1024: 2.42}


def curve(points: dict[int, float]) -> Curve:
    return Curve(tuple(points), tuple(points.values()))


def h100() -> PriceTable:
    """Prices as they are measured at a start, but of graphs of up to 1,024 rows alone."""
    keys, steps = GraphKeys(GraphSupport.RAGGED_Q, MAX_RUNNING, 1, 1024), curve(STEP_MS)
    graphs_ms = {key: steps.at(key.num_tokens) for key in keys.all if key.tag in (DECODE, MIXED)}
    keys.prefer_cheaper(graphs_ms)
    return PriceTable(
        keys.find_shape,
        graphs_ms,
        curve({rows: ms for rows, ms in STEP_MS.items() if rows >= 1024}),
        curve(READ_MS),
        kv_ms=4.0e-5,
        row_kv_ms=0.0,
        prompt_kv_ms=Curve((128, 512, 2048), (4.8e-4, 4.9e-4, 1.9e-3)),
    )


def shape_of(batch: ScheduleBatch) -> StepShape:
    """A step as it is launched, for its price."""
    kv_tokens, num_read, chunks = 0, 0, list[PromptChunk]()
    for _, num_rows, num_prompt, emits, kv_len in batch.requests:
        num_read += emits
        if num_prompt:
            chunks.append(PromptChunk(kv_len, num_rows))
        else:
            kv_tokens += kv_len + num_rows
    num_rows = sum(batch.max_q_lens)
    widest = max(batch.max_q_lens)
    return StepShape(len(batch.rows), widest, num_rows, num_read, kv_tokens, 0, tuple(chunks))


@dataclass
class PricedResult:
    """A step on its way; done at a time of the clock."""

    server: PricedServer
    end_s: float
    result: HostResult

    @property
    def is_ready(self) -> bool:
        return self.server.now >= self.end_s

    def wait(self) -> None:
        self.server.now = max(self.server.now, self.end_s)

    def read(self) -> HostResult:
        self.wait()
        self.server.now += HOST_S
        return self.result


class PricedWorker:
    """Steps take `excess(now)` times their price, one after the other; a decode gives a token."""

    server: PricedServer
    weights_version = 0

    def __init__(self, prices: PriceTable, excess: Callable[[float], float]) -> None:
        self._prices, self._excess = prices, excess
        self._free_s = 0.0

    def step_width(self, params: SamplingParams) -> StepWidth:
        return StepWidth(1, 0, 1)

    def forward_batch_generation(self, batch: ScheduleBatch) -> Any:
        server = self.server
        server.now += HOST_S
        took_ms = self._prices.price_ms(shape_of(batch)) * self._excess(server.now)
        start_s = max(self._free_s, server.now)
        self._free_s = start_s + took_ms / 1e3
        fed, num_decodes = sum(batch.num_prompt_tokens), batch.num_prompt_tokens.count(0)
        server.steps.append(Step(start_s, took_ms, fed, num_decodes))
        counts = [int(emits) for emits in batch.emits]
        rows = zip(batch.num_prompt_tokens, counts, strict=True)
        kept = [num_prompt or count for num_prompt, count in rows]
        return PricedResult(server, self._free_s, HostResult([[3]] * len(kept), counts, kept))

    def observe(self, result: HostResult) -> None: ...


@dataclass(frozen=True)
class Step:
    """A step as it was launched."""

    start_s: float
    took_ms: float
    fed: int
    num_decodes: int


@dataclass(frozen=True)
class Ask:
    """A request that a client will send.

    Attributes:
        new_tokens: that it gets.
        most_tokens: `max_new_tokens`; None: as many as it gets.
    """

    prompt_tokens: int
    new_tokens: int
    streams: bool = True
    most_tokens: int | None = None


@dataclass
class Told:
    """A request that was sent, and when its tokens came."""

    ask: Ask
    sent_s: float
    next_asks: Iterator[Ask] | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return (self.times_s[0] - self.sent_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self.times_s)]


class PricedServer(SchedulerHarness):
    """Serves clients until they have had all their answers.

    Attributes:
        steps: in the order of launches.
        told: requests that were sent.
    """

    def __init__(
        self,
        budget: PromptBudget,
        excess: Callable[[float], float] = lambda now: 1.0,
        prices: PriceTable | None = None,
        max_running: int = MAX_RUNNING,
        num_tokens: int = 440_000,
    ) -> None:
        setup = Setup(
            num_pages=num_tokens // 64,
            page_size=64,
            use_radix_cache=False,
            max_running_requests=max_running,
            max_queued_requests=None,
            make_budget=lambda: budget,
            enable_overlap=True,
            context_len=40_000,
            max_decode_rows=1,
            strict_invariants=False,
            eos_token_ids=frozenset(),
        )
        worker = PricedWorker(prices or h100(), excess)
        super().__init__(setup, worker)
        worker.server = self
        self.steps = list[Step]()
        self.told = dict[int, Told]()
        self._coming = list[tuple[float, int, Ask, Iterator[Ask] | None]]()
        self._number = itertools.count()

    def send(self, at_s: float, ask: Ask, next_asks: Iterator[Ask] | None = None) -> None:
        """A client asks at a time, and for the next when it has been answered."""
        heapq.heappush(self._coming, (at_s, next(self._number), ask, next_asks))

    def closed_loop(self, asks: Sequence[Ask], num_clients: int) -> None:
        """Starts `num_clients` clients that share what is to be asked."""
        left = iter(asks)
        for _ in range(num_clients):
            self.send(self.now, next(left), left)

    def serve(self, until_s: float = float("inf")) -> None:
        """Until a time, or until all has been answered."""
        while self.now < until_s:
            self._deliver()
            if self.is_idle:
                if not self._coming:
                    return
                self.now = max(self.now, self._coming[0][0])
                continue
            self.step()

    def _deliver(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            at_s, _, ask, next_asks = heapq.heappop(self._coming)
            most = ask.most_tokens or ask.new_tokens
            number = self.submit(
                [5] * ask.prompt_tokens,
                streams=ask.streams,
                max_new_tokens=most,
                ignore_eos=True,
                temperature=0.0,
            )
            self.told[number] = Told(ask, at_s, next_asks)

    def _to_detokenizer(self, message: Any) -> None:
        if not isinstance(message, BatchTokenIDOutput):
            return
        at_s = self.now + CLIENT_S
        for output in message.outputs:
            told = self.told[output.req_id]
            told.times_s += [at_s] * len(output.token_ids)
            if output.finish_reason is not None and told.next_asks is not None:
                ask = next(told.next_asks, None)
                if ask is not None:
                    self.send(at_s + CLIENT_S, ask, told.next_asks)


def noisy(mean: float, seed: int = 0, width: float = 0.04) -> Callable[[float], float]:
    """Steps of the same price do not all take the same."""
    rng = random.Random(seed)
    return lambda now: mean * (1 + rng.uniform(-width, width))
