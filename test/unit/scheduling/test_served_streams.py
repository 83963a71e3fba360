"""Streams and lists in a simulated server with the prices of an H100: the scheduler itself, on a
clock on which steps take what they cost."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from priced_server import Ask, PricedServer, Step, Told, h100, noisy
from sglang.benchmark.metrics import percentile
from sglang.srt.lookahead.prompt_budget import (
    MIN_PROMPT_TOKENS,
    SHARE_OF_OTHERS,
    PromptBudget,
)

MAX_CHUNK, BOUND_MS, MAX_GAP_RATIO = 8192, 30.0, 1.2
PRICES = h100()


def bounded(bound_ms: float = BOUND_MS, share: float = SHARE_OF_OTHERS) -> PromptBudget:
    return PromptBudget(MAX_CHUNK, PRICES, bound_ms, True, share)


def gap_p99_ms(told: list[Told]) -> float:
    return percentile([gap for each in told for gap in each.gaps_ms], 0.99)


@dataclass
class Loop:
    """A closed loop once it has warmed up: from when half of the requests were sent until the last
    one was.

    Attributes:
        deviation: of the time of steps, as a share of their mean: a loop that swings between
            prompts and ends has long steps and short ones.
    """

    tok_s: float
    first_p50_ms: float
    gap_p99_ms: float
    deviation: float


def run_loop(budget: PromptBudget, ask: Ask, num_clients: int) -> Loop:
    server = PricedServer(budget, noisy(1.08))
    server.closed_loop([ask] * 6 * num_clients, num_clients)
    server.serve()
    told = list(server.told.values())
    sent = sorted(each.sent_s for each in told)
    start, end = sent[len(sent) // 2], sent[-1]
    took = [step.took_ms for step in server.steps if start <= step.start_s < end]
    late = [each for each in told if each.sent_s >= start]
    num_tokens = sum(start <= at < end for each in told for at in each.times_s)
    return Loop(
        num_tokens / (end - start),
        percentile([each.first_ms for each in late], 0.5),
        gap_p99_ms(late),
        statistics.pstdev(took) / statistics.mean(took),
    )


# A prompt, its new tokens, clients: one prompt comes in each step, fewer, more than one, and ones
# that take several steps.
@pytest.mark.parametrize(
    ("num_prompt", "num_new", "num_clients"),
    [(512, 32, 32), (300, 64, 48), (64, 20, 64), (1500, 64, 32)],
)
def test_a_closed_loop_keeps_an_even_pace(num_prompt: int, num_new: int, num_clients: int) -> None:
    """Beside steps that take in all prompts that the bound has room for, whose clients' requests
    end at once, and so come at once."""
    ask = Ask(num_prompt, num_new)
    even = run_loop(bounded(), ask, num_clients)
    together = run_loop(bounded(share=1.0), ask, num_clients)
    most = 0.6 if num_prompt <= 512 else 1.0
    assert even.deviation < most * together.deviation
    assert even.first_p50_ms < together.first_p50_ms
    assert even.gap_p99_ms <= 1.01 * together.gap_p99_ms
    assert even.tok_s > 0.99 * together.tok_s


@pytest.mark.parametrize(("bound_ms", "slowness"), [(25.0, 1.0), (30.0, 1.0), (40.0, 1.2)])
def test_a_long_prompt_and_the_streams_beside_it_both_get_on(
    bound_ms: float, slowness: float
) -> None:
    """The clock of the device falls while it works, so that steps take longer than their price."""
    long = Ask(32_760, 1)
    idle = PricedServer(bounded(bound_ms), noisy(slowness))
    idle.send(0.0, long)
    idle.serve()
    server = PricedServer(bounded(bound_ms), noisy(slowness))
    for _ in range(64):
        server.send(0.0, Ask(128, 260))
    server.send(1.0, long)
    server.serve()
    (waited,) = [each for each in server.told.values() if each.ask is long]
    streams = [each for each in server.told.values() if each.ask is not long]
    beside = [
        gap
        for each in streams
        for gap, end_s in zip(each.gaps_ms, each.times_s[1:], strict=True)
        if waited.sent_s < end_s <= waited.times_s[0]
    ]
    assert len(beside) > 1000
    assert percentile(beside, 0.99) <= MAX_GAP_RATIO * bound_ms
    if bound_ms >= 30:
        assert waited.first_ms <= 2 * idle.told[1].first_ms


def mixture(server: PricedServer, seed: int) -> None:
    """Streams that come at random, more for a while than can be served, a burst of them, a list,
    and long prompts."""
    rng, at_s = random.Random(seed), 0.0
    while at_s < 1.5:
        at_s += rng.expovariate(70.0 if 0.4 < at_s < 0.9 else 25.0)
        length = rng.choice([10, 100, 500, 2000])
        server.send(at_s, Ask(length, rng.randint(1, 40), most_tokens=None))
    for _ in range(20):
        server.send(0.7, Ask(300, 20))
        server.send(0.2, Ask(1000, 30, streams=False))
    for start_s in (0.3, 1.0):
        server.send(start_s, Ask(12_000, 5))


def test_nobody_starves_in_a_mixture_and_gaps_keep_to_the_bound() -> None:
    server = PricedServer(bounded(), noisy(1.1, width=0.03), max_running=48)
    unbounded = PricedServer(PromptBudget(MAX_CHUNK), noisy(1.1, width=0.03), max_running=48)
    for each in (server, unbounded):
        mixture(each, 0)
        each.serve()
    told, others = list(server.told.values()), list(unbounded.told.values())
    assert len(told) == len(others)
    assert all(len(each.times_s) == each.ask.new_tokens for each in told)
    streams = [each for each in told if each.ask.streams]
    assert gap_p99_ms(streams) <= MAX_GAP_RATIO * BOUND_MS
    assert gap_p99_ms([each for each in others if each.ask.streams]) > 3 * BOUND_MS
    assert max(each.first_ms for each in told) <= 2 * max(each.first_ms for each in others)


Send = Callable[[PricedServer], None]


def fed(server: PricedServer, send: Send) -> list[Step]:
    send(server)
    server.serve()
    return server.steps


def test_lists_take_the_steps_that_they_take_without_a_bound() -> None:
    def send(server: PricedServer) -> None:
        for number in range(40):
            server.send(0.1 * (number % 3), Ask(900, 30 + number, streams=False))

    without = fed(PricedServer(PromptBudget(MAX_CHUNK)), send)
    assert fed(PricedServer(bounded()), send) == without
    assert max(step.took_ms for step in without if step.num_decodes) > 3 * BOUND_MS


def test_a_list_beside_a_stream_waits_as_long_as_bounded_steps_take() -> None:
    """It loses no more than its prompts lose in steps of the bound's length, and takes steps
    without one when the stream has ended."""

    def send(server: PricedServer, num_stream_tokens: int) -> float:
        if num_stream_tokens:
            server.send(0.0, Ask(100, num_stream_tokens))
        for _ in range(32):
            server.send(0.1, Ask(1024, 60, streams=False))
        server.serve()
        lists = [each for each in server.told.values() if not each.ask.streams]
        return max(each.times_s[-1] for each in lists)

    alone = send(PricedServer(PromptBudget(MAX_CHUNK)), 0)
    server = PricedServer(bounded())
    beside = send(server, 300)
    assert alone < beside < 1.3 * alone
    # The stream's first token is the first step's.
    late = [step for step in server.steps[1:] if step.num_decodes and step.fed]
    assert all(step.took_ms <= BOUND_MS or step.fed <= MIN_PROMPT_TOKENS for step in late), (
        "while the stream decodes"
    )
    shortly = PricedServer(bounded())
    assert send(shortly, 20) < beside
