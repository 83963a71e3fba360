"""Shares of a step's prompt tokens: long prompts, short ones beside them, newcomers."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest

from fake_worker import VOCAB_SIZE, FakeWorker, oracle
from sglang.srt.lookahead.prompt_budget import (
    MIN_EXCESS,
    MIN_PROMPT_TOKENS,
    PRICE_MARGIN,
    PromptBudget,
)
from sglang.srt.scheduling.batch_planner import MAX_PASSED
from sglang.srt.scheduling.step_builder import ENDING_SHARE
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, StepShape, no_graphs
from sglang.srt.step.worker import GenerationBatchResult, ScheduleBatch
from utils import SchedulerHarness, Setup

CHUNK, K = 40, 4
KEPT = int(ENDING_SHARE * CHUNK)
SETUP = Setup(chunked_prefill_size=CHUNK, use_radix_cache=False, enable_overlap=False)
GREEDY = {"max_new_tokens": 3, "temperature": 0.0}


@dataclass(frozen=True)
class Fed:
    """A step as the worker got it: prompt tokens by row, and the bounds of KV of all rows."""

    prompts: dict[int, int]
    batch: ScheduleBatch


class Watched(SchedulerHarness):
    """A scheduler whose steps are looked at."""

    def __init__(self, setup: Setup, kind: str = "plain") -> None:
        worker = FakeWorker(kind, K, setup.max_running_requests, seed=0)
        super().__init__(setup, worker)
        self.steps: list[Fed] = []
        forward = worker.forward_batch_generation

        def watch(batch: ScheduleBatch) -> GenerationBatchResult:
            fed = zip(batch.rows, batch.num_prompt_tokens, strict=True)
            self.steps.append(Fed({row: count for row, count in fed if count}, batch))
            return forward(batch)

        worker.forward_batch_generation = watch  # type: ignore[method-assign]

    def fed_now(self) -> list[int]:
        """Prompt tokens of the next step, request by request, the most first."""
        num_steps = len(self.steps)
        self.step()
        assert len(self.steps) == num_steps + 1
        return sorted(self.steps[-1].prompts.values(), reverse=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % VOCAB_SIZE for i in range(length)]


def test_a_long_prompt_alone_takes_every_step_whole() -> None:
    harness = Watched(SETUP)
    harness.submit(prompt(3 * CHUNK + 5), **GREEDY)
    assert [harness.fed_now() for _ in range(4)] == [[CHUNK], [CHUNK], [CHUNK], [5]]


def test_while_a_long_prompt_is_read_a_share_goes_to_those_that_end() -> None:
    harness = Watched(SETUP)
    harness.submit(prompt(200), **GREEDY)
    assert harness.fed_now() == [CHUNK]
    for length in (KEPT - 3, 2, 2):
        harness.submit(prompt(length), **GREEDY)
    assert harness.fed_now() == [CHUNK - KEPT + 1, KEPT - 3, 2]
    assert harness.fed_now() == [CHUNK - 2, 2], "the third had to wait for one step"
    harness.submit(prompt(KEPT + 1), **GREEDY)
    assert harness.fed_now() == [CHUNK], "too long for the share"


def test_who_could_end_in_a_step_but_not_in_the_share_gets_that_of_several_steps() -> None:
    """And nobody passes it meanwhile."""
    harness = Watched(SETUP)
    harness.submit(prompt(400), **GREEDY)
    assert harness.fed_now() == [CHUNK]
    length = 2 * KEPT + 5
    first = harness.submit(prompt(length, 1), **GREEDY)
    harness.submit(prompt(2, 2), **GREEDY)
    assert [harness.fed_now() for _ in range(2)] == [[CHUNK], [CHUNK]]
    assert harness.fed_now() == [length, CHUNK - length - 2, 2]
    assert harness.outputs[first].token_ids
    harness.submit(prompt(length, 3), **GREEDY)
    assert harness.fed_now() == [CHUNK], "What was saved is used up."


def test_nothing_is_saved_for_who_cannot_end_in_a_step() -> None:
    harness = Watched(SETUP)
    harness.submit(prompt(400), **GREEDY)
    harness.submit(prompt(CHUNK + 1, 1), **GREEDY)
    for number in range(4):
        harness.submit(prompt(KEPT - number, 2), **GREEDY)
        assert harness.fed_now() == [CHUNK - KEPT + number, KEPT - number]


def test_prompts_that_end_before_the_long_one_have_had_the_share() -> None:
    harness = Watched(SETUP)
    for length in (KEPT, 200, 2):
        harness.submit(prompt(length), **GREEDY)
    assert harness.fed_now() == [CHUNK - KEPT, KEPT]
    assert harness.fed_now() == [CHUNK - 2, 2]


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_and_a_stream_of_short_ones_both_progress(kind: str, overlap: bool) -> None:
    rng = random.Random(kind)
    harness = Watched(replace(SETUP, enable_overlap=overlap, num_pages=2000), kind)
    long = harness.submit(prompt(450), **GREEDY)
    harness.step()
    asked: dict[int, int] = {}
    prompts: dict[int, list[int]] = {long: prompt(450)}
    waited: list[int] = []
    for turn in range(14):
        text = prompt(rng.randint(1, KEPT), turn)
        request = harness.submit(text, **GREEDY)
        asked[request], prompts[request] = turn, text
        harness.step()
        for request in [number for number in asked if harness.outputs[number].token_ids]:
            waited.append(turn - asked.pop(request))
    assert len(waited) >= 12
    assert max(waited) <= 3
    least = CHUNK - KEPT
    assert all(max(step.prompts.values()) >= least for step in harness.steps[: 450 // CHUNK])
    assert all(sum(step.prompts.values()) <= CHUNK for step in harness.steps)
    harness.run()
    for request, text in prompts.items():
        assert harness.outputs[request].token_ids == oracle(text, 3)


def test_short_prompts_pass_waiting_ones_that_would_have_to_wait_anyway() -> None:
    harness = Watched(SETUP)
    harness.submit(prompt(200), **GREEDY)
    harness.step()
    second = harness.submit(prompt(120, 1), **GREEDY)
    short = harness.submit(prompt(5, 2), **GREEDY)
    assert harness.fed_now() == [CHUNK - 5, 5]
    assert harness.outputs[short].token_ids
    waiting = harness.scheduler.lifecycle.waiting
    assert [req.req_id for req in waiting] == [second], "and it has not been begun"
    harness.run()
    assert harness.outputs[second].token_ids == oracle(prompt(120, 1), 3)


def test_no_more_than_a_few_are_passed() -> None:
    harness = Watched(replace(SETUP, max_running_requests=16, num_pages=4000))
    for _ in range(2 + MAX_PASSED):
        harness.submit(prompt(100), **GREEDY)
    harness.submit(prompt(5), **GREEDY)
    assert harness.fed_now() == [CHUNK]
    assert harness.fed_now() == [CHUNK]
    assert harness.fed_now() == [20, 20], "the first ends, the second begins"
    assert harness.fed_now() == [CHUNK - 5, 5]


def test_who_is_passed_keeps_a_row() -> None:
    harness = Watched(replace(SETUP, max_running_requests=2))
    harness.submit(prompt(120), **GREEDY)
    harness.step()
    harness.submit(prompt(120, 1), **GREEDY)
    harness.submit(prompt(5, 2), **GREEDY)
    assert harness.fed_now() == [CHUNK]
    assert len(harness.scheduler.lifecycle.waiting) == 2
    alone = Watched(replace(SETUP, max_running_requests=2))
    alone.submit(prompt(120), **GREEDY)
    alone.step()
    alone.submit(prompt(5, 2), **GREEDY)
    assert alone.fed_now() == [CHUNK - 5, 5]


@pytest.mark.parametrize(
    ("num_pages", "passes"), [(249, False), (255, False), (264, False), (265, True)]
)
def test_who_is_passed_keeps_its_slots(num_pages: int, passes: bool) -> None:
    """120 and 120 tokens and 5 more for what each may generate: 250 in all. With fewer slots
    the second one does not fit and nobody passes it; with more, the short one has to fit too."""
    harness = Watched(replace(SETUP, num_pages=num_pages))
    harness.submit(prompt(120), **GREEDY)
    harness.step()
    harness.submit(prompt(120, 1), **GREEDY)
    harness.submit(prompt(10, 2), **GREEDY)
    assert harness.fed_now() == ([CHUNK - 10, 10] if passes else [CHUNK])


def test_who_was_pushed_aside_does_not_pass_whom_it_made_room_for() -> None:
    """Else it would be pushed aside again in each step until the long prompt has been read."""
    setup = replace(SETUP, num_pages=380, max_running_requests=3, preemption_threshold=0)
    harness = Watched(setup)
    lowly = harness.submit(prompt(5, 1), max_new_tokens=60, temperature=0.0)
    harness.step()
    harness.submit(prompt(200), **GREEDY, priority=1)
    harness.step()
    urgent = harness.submit(prompt(120, 2), max_new_tokens=60, temperature=0.0, priority=1)
    harness.run()
    assert harness.outputs[lowly].num_retractions == 1
    assert harness.outputs[urgent].token_ids == oracle(prompt(120, 2), 60)
    assert harness.outputs[lowly].token_ids == oracle(prompt(5, 1), 60)


def test_of_a_prompt_only_what_is_not_cached_counts() -> None:
    harness = Watched(replace(SETUP, use_radix_cache=True))
    text = prompt(100)
    harness.generate([text], **GREEDY)
    harness.submit(prompt(200, 3), **GREEDY)
    harness.step()
    harness.submit([*text, 1, 2], **GREEDY)
    assert harness.fed_now() == [CHUNK - 2, 2]


def test_a_step_with_decodes_stays_within_its_bound() -> None:
    """Each step is priced anew from what the worker got. The steps of this worker take less than
    their prices, so the budget comes to trust in the least that they may."""
    prices = PriceTable(
        no_graphs,
        {},
        Curve((1, 200, 2000), (2.0, 4.0, 20.0)),
        Curve((1, 100), (0.1, 0.5)),
        kv_ms=1e-4,
        row_kv_ms=1e-5,
        prompt_kv_ms=Curve((100, 1000), (2e-4, 2e-3)),
    )
    for kind, max_ms in (("plain", 6.0), ("mtp", 6.0), ("verify", 8.0), ("plain", 0.5)):
        setup = Setup(
            num_pages=6000,
            context_len=2000,
            make_budget=partial(PromptBudget, 1000, prices, max_ms),
            use_radix_cache=False,
        )
        harness = Watched(setup, kind)
        requests = {}
        rng = random.Random(kind)
        for length in (20, 1500, 7, 900, 300, 1800, 64):
            text = prompt(length, length)
            params = {"max_new_tokens": rng.randint(20, 60), "temperature": 0.0}
            requests[harness.submit(text, **params)] = text, params["max_new_tokens"]
            for _ in range(3):
                harness.step()
        harness.run()
        for request, (text, num_new) in requests.items():
            assert harness.outputs[request].token_ids == oracle(text, int(num_new))
        check_prices(harness.steps, prices, max_ms / (PRICE_MARGIN * MIN_EXCESS))


def check_prices(steps: list[Fed], prices: PriceTable, max_ms: float) -> None:
    num_bounded = 0
    for step in steps:
        batch, num_tokens = step.batch, sum(step.prompts.values())
        is_decode = [count == 0 for count in batch.num_prompt_tokens]
        if not any(is_decode):
            assert num_tokens <= 1000
            continue
        if num_tokens == 0:
            continue
        kv_tokens = row_kv = num_read = 0
        chunks = list[PromptChunk]()
        for i, num_rows in enumerate(batch.max_q_lens):
            before = batch.kv_lens_before[i]
            if is_decode[i]:
                kv_tokens += before
                row_kv += num_rows * before
                num_read += num_rows
            else:
                chunks.append(PromptChunk(before, num_rows))
                num_read += 1 + num_rows - batch.num_prompt_tokens[i]
        num_rows = sum(batch.max_q_lens)
        shape = StepShape(len(batch.rows), 1, num_rows, num_read, kv_tokens, row_kv, tuple(chunks))
        if prices.price_ms(shape) > max_ms:
            assert num_tokens <= MIN_PROMPT_TOKENS
        else:
            num_bounded += 1
    assert num_bounded > 3 or max_ms < 1


@pytest.mark.parametrize("for_streams_alone", [True, False])
def test_a_bound_for_streams_holds_from_the_arrival_of_one_to_the_end_of_the_last(
    for_streams_alone: bool,
) -> None:
    """Streams wait, decode and end beside lists, which never stop."""
    prices = PriceTable(no_graphs, {}, Curve((1, 1000), (1.0, 1000.0)), Curve((1, 9), (0.0, 0.0)))
    setup = replace(
        SETUP,
        num_pages=9000,
        context_len=2000,
        max_running_requests=4,
        make_budget=partial(PromptBudget, 1000, prices, 300, for_streams_alone),
    )
    harness, rng, streams = Watched(setup), random.Random(0), set[int]()
    seen = {(is_bound, someone): 0 for is_bound in (True, False) for someone in (True, False)}
    for _ in range(400):
        if len(harness.scheduler.lifecycle.waiting) < 3:
            is_stream = rng.random() < 0.1
            new = {"max_new_tokens": 3 if is_stream else 20, "ignore_eos": True}
            request = harness.submit(prompt(1700), streams=is_stream, **new)
            streams |= {request} if is_stream else set()
        streams -= {each for each in streams if harness.outputs[each].finish_reason}
        harness.step()
        fed, batch = sum(harness.steps[-1].prompts.values()), harness.steps[-1].batch
        if 0 in batch.num_prompt_tokens and fed:
            is_bound = fed <= 300
            seen[is_bound, bool(streams)] += 1
    harness.run()
    assert harness.scheduler.lifecycle.num_streams == 0
    assert seen[False, True] == 0, "a step beside a stream was longer than it may be"
    assert seen[True, True] > 10
    assert (seen[False, False] > 10) is for_streams_alone
