"""Whatever happens to requests, the ledger stays exact, tokens stay right, and each request is
answered once. Random programs over the scheduler with workers that accept one or many tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from fake_worker import VOCAB_SIZE, FakeWorker, oracle
from sglang.srt.mem_cache import shared_prefixes
from sglang.srt.messages.control import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReq,
)
from sglang.srt.sampling.sampling_params import Speculative
from sglang.srt.step.worker import GenerationBatchResult, ScheduleBatch
from utils import RandomBudget, SchedulerHarness, Setup

KINDS = ("plain", "verify", "mtp")
NUM_SEEDS = 50  # per kind
K = 4
WIDEST_STEP = {"plain": 1, "verify": 1 + K, "mtp": 2 * K - 1}  # rows of a request
CONTEXT = 108


@dataclass
class Submitted:
    prompt: list[int]
    max_new_tokens: int


class Storm:
    """A seeded program of arrivals, aborts, disconnects and flushes against one scheduler."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        page_size = choose([1, 1, 4, 16, 64])
        chunk = choose([4, 16, 2048])
        self.setup = Setup(
            page_size=page_size,
            num_pages=choose([160, 240, 600]) // page_size,
            use_radix_cache=choose([True, True, False]),
            max_running_requests=choose([1, 3, 8]),
            max_queued_requests=choose([2, 100, 100]),
            chunked_prefill_size=chunk,
            splits_prompts=chunk < 2048,
            make_budget=partial(RandomBudget, chunk, seed) if chunk == 16 and seed % 2 else None,
            schedule_policy=choose(["fcfs", "lpm"]),
            preemption_threshold=choose([None, None, 0, 3]),
            retract_interval=choose([0, 0, 3]),
            enable_overlap=choose([True, True, False]),
            eos_token_ids=choose([frozenset(), frozenset({0, 1})]),
            context_len=CONTEXT,
            max_decode_rows=WIDEST_STEP[kind],
        )
        self.worker = FakeWorker(kind, K, self.setup.max_running_requests, seed)
        self.harness = SchedulerHarness(self.setup, self.worker)
        self.submitted: dict[int, Submitted] = {}
        self.families = [self._tokens(self.random.randint(1, 60)) for _ in range(3)]

    def run(self) -> None:
        for _ in range(self.random.randint(20, 120)):
            self._act()
            self.harness.step()
        self.harness.run()

    def _act(self) -> None:
        draw = self.random.random()
        inbox = self.harness.inbox.messages
        if draw < 0.45:
            for _ in range(self.random.choice([1, 1, 5])):
                self._submit()
        elif draw < 0.55 and self.submitted:
            inbox.append(AbortReq(req_ids=[self.random.choice(list(self.submitted))]))
        elif draw < 0.58 and self.submitted:
            inbox.append(AbortReq(rid=f"request-{self.random.choice(list(self.submitted))}"))
        elif draw < 0.59:
            inbox.append(AbortReq(abort_all=True))
        elif draw < 0.62:
            inbox.append(FlushCacheReqInput(call_id=1))

    def _submit(self) -> None:
        family = self.random.choice(self.families)
        prompt = family[: self.random.randint(1, len(family))] + self._tokens(
            self.random.choice([0, 1, 7])
        )
        max_new_tokens = self.random.choice([0, 1, 2, 9, 40])
        if self.random.random() < 0.06:  # to the end of the context, or nearly
            end = CONTEXT - self.random.choice([0, 0, 1, 2, self.random.randint(3, 40)])
            prompt += self._tokens(max(0, end - max_new_tokens - len(prompt)))
        req_id = self.harness.submit(
            prompt,
            stream_interval=None if self.random.random() < 0.7 else 1000,
            priority=self.random.choice([0, 0, 0, 2, 9]),
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            speculative=Speculative(enabled=self.random.random() < 0.7),
        )
        self.submitted[req_id] = Submitted(prompt, max_new_tokens)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]


def expected_output(request: Submitted, eos: frozenset[int]) -> tuple[list[int], str]:
    """Tokens and finish type of a request that is left alone."""
    tokens = oracle(request.prompt, request.max_new_tokens)
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1], "stop"
    return tokens, "length"


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", KINDS)
def test_ledger_tokens_and_answers_survive_any_storm(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness checks the ledger after every step and every turn of the loop, the worker which
    prefixes requests share."""
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_TOKENS", 0)
    num_aborted = num_retracted = num_refused = num_shared = 0
    for seed in range(NUM_SEEDS):
        storm = Storm(kind, seed)
        storm.run()
        for req_id, request in storm.submitted.items():
            outcome = storm.harness.outputs[req_id]
            where = f"{kind}, seed {seed}, request {req_id}, {storm.setup}"
            assert outcome.num_ends == 1, where
            assert len(outcome.options) == 1, where
            assert outcome.finish_reason is not None
            tokens, kind_of_end = expected_output(request, storm.setup.eos_token_ids)
            if outcome.finish_reason.type == "abort":
                assert outcome.token_ids == tokens[: len(outcome.token_ids)], where
                num_refused += outcome.finish_reason.status_code == 503
                num_aborted += 1
            else:
                assert outcome.token_ids == tokens, where
                assert outcome.finish_reason.type == kind_of_end, where
            num_retracted += outcome.num_retractions
        num_shared += storm.worker.num_shared_prefixes
        ledger = storm.harness.ledger
        assert ledger.num_used_rows == 0
        assert ledger.num_free_tokens + ledger.num_tree_tokens == ledger.num_pool_tokens
    # The storms must really do what they are meant to.
    assert num_aborted > 100
    assert num_refused > 10
    assert num_retracted > 100
    assert num_shared > 100 or kind != "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_flush_answers_and_empties_only_an_idle_cache(kind: str) -> None:
    harness = SchedulerHarness(Setup(), FakeWorker(kind, K, 8, seed=0))
    harness.submit([1, 2, 3, 4, 5, 6], max_new_tokens=20, temperature=0.0)
    harness.step()
    harness.inbox.messages.append(FlushCacheReqInput(call_id=7))
    harness.step()
    refused = harness.replies[-1]
    assert isinstance(refused, FlushCacheReqOutput)
    assert not refused.success
    assert "1 requests are running" in refused.error_msg
    harness.run()
    cached = harness.ledger.num_tree_tokens
    assert cached > 0
    harness.inbox.messages.append(FlushCacheReqInput(call_id=8))
    harness.step()
    assert harness.replies[-1] == FlushCacheReqOutput(call_id=8, success=True, flushed_items=cached)
    assert harness.ledger.num_free_tokens == harness.ledger.num_pool_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefix_computed_once_is_reused_and_gives_the_same_tokens(
    kind: str, overlap: bool
) -> None:
    for page_size in (1, 16):
        setup = Setup(page_size=page_size, enable_overlap=overlap)
        harness = SchedulerHarness(setup, FakeWorker(kind, K, 8, seed=0))
        prompt = [i * 7 % VOCAB_SIZE for i in range(50)]
        first = harness.generate([prompt], max_new_tokens=9, temperature=0.0)
        again = harness.generate([prompt], max_new_tokens=9, temperature=0.0)
        assert first == again == [oracle(prompt, 9)]
        assert harness.outputs[2].cached_tokens == 49 // page_size * page_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_request_leaves_its_output_in_the_cache_up_to_the_stop(kind: str) -> None:
    """Checks that no more is cached than has KV, and nothing past the stop."""
    harness = SchedulerHarness(Setup(), FakeWorker(kind, K, 8, seed=0))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    output = harness.generate([prompt], max_new_tokens=20, temperature=0.0)[0]
    total = len(prompt) + len(output)
    widest_pending = K if kind == "mtp" else 1
    assert total - widest_pending <= harness.ledger.num_tree_tokens <= total


@pytest.mark.parametrize("kind", KINDS)
def test_decode_and_prefill_share_steps(kind: str) -> None:
    """A newcomer's prompt does not stop the running requests: both move in one step."""
    worker = FakeWorker(kind, K, 8, seed=0)
    harness = SchedulerHarness(Setup(chunked_prefill_size=4), worker)
    first = harness.submit([1, 2], max_new_tokens=200, temperature=0.0)
    for _ in range(3):
        harness.step()
    before = len(harness.outputs[first].token_ids)
    second = harness.submit(list(range(40)), max_new_tokens=4, temperature=0.0)
    for _ in range(8):
        harness.step()
    assert worker.max_rows_in_batch == 2
    assert len(harness.outputs[first].token_ids) >= before + 8
    assert harness.outputs[second].token_ids == []
    harness.run()
    assert harness.outputs[second].token_ids == oracle(list(range(40)), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_chunks_every_prompt_is_fed_in_one_step(kind: str) -> None:
    worker = FakeWorker(kind, K, 8, seed=0)
    setup = Setup(chunked_prefill_size=40, splits_prompts=False, use_radix_cache=False)
    harness = SchedulerHarness(setup, worker)
    lengths = [30, 25, 40, 5, 39, 2, 20, 20]
    prompts = [[length + i for i in range(length)] for length in lengths]
    fed: list[int] = []
    forward = worker.forward_batch_generation

    def watch(batch: ScheduleBatch) -> GenerationBatchResult:
        fed.extend(count for count in batch.num_prompt_tokens if count)
        assert sum(batch.num_prompt_tokens) <= 40
        return forward(batch)

    worker.forward_batch_generation = watch  # type: ignore[method-assign]
    outputs = harness.generate(prompts, max_new_tokens=9, temperature=0.0)
    assert sorted(fed) == sorted(lengths)
    assert outputs == [oracle(prompt, 9) for prompt in prompts]


def test_the_queue_limit_refuses_exactly_the_surplus_with_503() -> None:
    harness = SchedulerHarness(
        Setup(max_running_requests=1, max_queued_requests=3), FakeWorker("plain", K, 1, seed=0)
    )
    ids = [harness.submit([i, 2, 3], max_new_tokens=3, temperature=0.0) for i in range(8)]
    harness.run()
    ends = [harness.outputs[req_id].finish_reason for req_id in ids]
    refused = [end for end in ends if end is not None and end.status_code == 503]
    assert len(refused) == 4
    assert all(end is not None and end.type == "length" for end in ends[:4])


def test_places_of_running_requests_are_no_places_in_the_queue() -> None:
    """Requests that come together find the engine idle, whatever a step can read of them."""
    setup = Setup(max_running_requests=4, max_queued_requests=3, chunked_prefill_size=4)
    harness = SchedulerHarness(setup, FakeWorker("plain", K, 4, seed=0))
    ids = [harness.submit([i, 2, 3], max_new_tokens=30, temperature=0.0) for i in range(7)]
    harness.run()
    assert all(harness.outputs[req_id].token_ids for req_id in ids)


def test_the_place_of_a_request_that_has_just_ended_is_free() -> None:
    """Under overlap a step that its client does not wait for may still be in flight."""
    setup = Setup(max_running_requests=1, max_queued_requests=3, enable_overlap=True)
    harness = SchedulerHarness(setup, FakeWorker("plain", K, 1, seed=0))
    stop = oracle([9, 2, 3], 5)[-1]
    first = harness.submit([9, 2, 3], max_new_tokens=50, temperature=0.0, stop_token_ids=[stop])
    while harness.outputs[first].finish_reason is None:
        harness.step()
    assert harness.ongoing is not None
    ids = [harness.submit([i, 2, 3], max_new_tokens=3, temperature=0.0) for i in range(4)]
    harness.run()
    assert all(harness.outputs[req_id].token_ids for req_id in ids)


def test_a_queue_behind_a_full_pool_is_no_longer_than_it_may_be() -> None:
    setup = Setup(max_running_requests=8, max_queued_requests=2, num_pages=60)
    harness = SchedulerHarness(setup, FakeWorker("plain", K, 8, seed=0))
    running = harness.submit([1] * 40, max_new_tokens=15, temperature=0.0)
    harness.step()
    ids = [harness.submit([i] * 40, max_new_tokens=3, temperature=0.0) for i in range(2, 7)]
    harness.run()
    ends = [harness.outputs[req_id].finish_reason for req_id in (running, *ids)]
    assert [end is not None and end.status_code for end in ends] == [None] * 3 + [503] * 3


def test_a_paused_engine_has_no_places_but_those_of_its_queue() -> None:
    harness = SchedulerHarness(
        Setup(max_running_requests=4, max_queued_requests=1), FakeWorker("plain", K, 4, seed=0)
    )
    harness.call(PauseGenerationReq(call_id=5, mode="retract"))
    ids = [harness.submit([i, 2, 3], max_new_tokens=3, temperature=0.0) for i in range(3)]
    harness.step()
    refused = [harness.outputs[req_id].finish_reason is not None for req_id in ids]
    assert refused == [False, True, True]


def test_without_a_limit_a_batch_of_any_size_waits() -> None:
    harness = SchedulerHarness(
        Setup(max_running_requests=4, max_queued_requests=None), FakeWorker("plain", K, 4, seed=0)
    )
    ids = [harness.submit([i % 50, 2, 3], max_new_tokens=1, temperature=0.0) for i in range(1500)]
    harness.run()
    ends = [harness.outputs[req_id].finish_reason for req_id in ids]
    assert all(end is not None and end.type == "length" for end in ends)


def test_retracted_requests_go_ahead_of_never_admitted_ones() -> None:
    harness = SchedulerHarness(Setup(num_pages=90), FakeWorker("plain", K, 8, seed=0))
    for i in range(12):
        harness.submit([i, i + 1, i + 2], max_new_tokens=40, temperature=0.0)
    seen_retracted = False
    while not harness.is_idle:
        harness.step()
        waiting = harness.scheduler.lifecycle.waiting
        flags = [req.was_admitted for req in waiting]
        assert flags == sorted(flags, reverse=True)
        arrivals = [req.arrival for req in waiting]
        assert arrivals == sorted(arrivals)
        seen_retracted |= any(flags)
    assert seen_retracted


def test_aborting_a_running_request_answers_in_the_same_turn_with_its_partial_output() -> None:
    harness = SchedulerHarness(Setup(), FakeWorker("plain", K, 8, seed=0))
    req_id = harness.submit([5, 6, 7], stream_interval=50, max_new_tokens=100, temperature=0.0)
    for _ in range(10):
        harness.step()
    harness.inbox.messages.append(AbortReq(req_ids=[req_id]))
    harness.step()
    outcome = harness.outputs[req_id]
    assert outcome.num_ends == 1
    assert 5 <= len(outcome.token_ids) <= 10
    assert outcome.token_ids == oracle([5, 6, 7], 100)[: len(outcome.token_ids)]
    harness.run()
    assert harness.ledger.num_free_tokens + harness.ledger.num_tree_tokens == 512


class TreeSizes(SchedulerHarness):
    """Notes, whenever news are sent, how many tokens the prefix cache has."""

    def __init__(self, setup: Setup, kind: str) -> None:
        self.sizes: list[int] = []
        super().__init__(setup, FakeWorker(kind, K, setup.max_running_requests, seed=0))

    def _to_detokenizer(self, message: Any) -> None:
        self.sizes.append(self.ledger.num_tree_tokens)
        super()._to_detokenizer(message)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_clients_hear_of_a_token_before_the_prefix_cache_gets_the_prompt(
    kind: str, overlap: bool
) -> None:
    harness = TreeSizes(Setup(enable_overlap=overlap), kind)
    prompt = list(range(40))
    assert harness.generate([prompt], max_new_tokens=1) == [oracle(prompt, 1)]
    assert harness.sizes == [0]
    assert harness.ledger.num_tree_tokens == len(prompt)
    harness.generate([prompt], max_new_tokens=1)
    assert harness.outputs[2].cached_tokens == len(prompt) - 1
