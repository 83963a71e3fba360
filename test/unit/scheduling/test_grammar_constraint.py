"""Requests with a grammar over the bundled model: their outputs match, whatever the scheduler does
with them, and nobody else's change."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from drafter_checks import make_drafter_runners
from fake_worker import FakeWorker
from grammar_cases import CASES, DEMO, DEMO_EOS, DEMO_MASK, ENDLESS, SETUP
from ngram_drafter import PLACE, NgramOptions
from sglang.srt.constrained.grammar_sessions import GrammarSessions
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.worker import Worker
from sglang.srt.tokenizer import load_tokenizer
from storm_grammars import CountedGrammars
from utils import (
    MTP_MAX_ROWS,
    Collected,
    SchedulerHarness,
    Setup,
    make_model_worker,
    make_mtp_worker,
    make_runner,
)

TOKENIZER = load_tokenizer(DEMO)
PROMPT = TOKENIZER.encode("def f(x):\n    ")
SETUP_OF_STEPS = Setup(eos_token_ids=frozenset([DEMO_EOS]), num_pages=2048, context_len=512)
NUM_NEW = 90
SAMPLED = [{"temperature": 0.0}, {"temperature": 1.0, "sampling_seed": 11}]
FREE = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def sessions() -> Iterator[GrammarSessions]:
    made = GrammarSessions(SETUP)
    yield made
    made.close()


@pytest.fixture(scope="module")
def worker() -> Worker:
    return make_model_worker(DEMO, SETUP_OF_STEPS, SETUP_OF_STEPS.context_len)


def run(harness: SchedulerHarness) -> None:
    """Until nothing is left to do; compiling takes a while."""
    while not harness.is_idle:
        harness.step()
        if not harness.scheduler.control.has_work:
            time.sleep(0.001)
    harness.run()


def submit_all(harness: SchedulerHarness, **more: Any) -> list[int]:
    """Every case, greedy and sampled."""
    return [
        harness.submit(PROMPT, max_new_tokens=NUM_NEW, **{grammar.kind: grammar.text}, **how | more)
        for grammar, _ in CASES.values()
        for how in SAMPLED
    ]


def outputs_of(harness: SchedulerHarness, ids: list[int]) -> list[list[int]]:
    return [harness.outputs[req_id].token_ids for req_id in ids]


def check_matches(outputs: list[Collected]) -> int:
    """Returns how many have ended by themselves."""
    num_ended = 0
    for index, output in enumerate(outputs):
        _, is_match = list(CASES.values())[index // len(SAMPLED)]
        assert output.finish_reason is not None
        if output.finish_reason.type == "stop":
            num_ended += 1
            assert output.token_ids[-1] == DEMO_EOS
            text = TOKENIZER.decode(output.token_ids)
            assert is_match(text), text
        else:
            assert output.finish_reason.type == "length"
    return num_ended


@pytest.fixture(scope="module")
def plain(worker: Worker, sessions: GrammarSessions) -> list[list[int]]:
    """Outputs of `submit_all`, one request at a time."""
    setup = Setup(**{**vars_of(SETUP_OF_STEPS), "enable_overlap": False, "max_running_requests": 1})
    harness = SchedulerHarness(setup, worker, grammars=sessions)
    ids = submit_all(harness)
    run(harness)
    assert check_matches([harness.outputs[i] for i in ids]) == len(ids)
    return outputs_of(harness, ids)


def vars_of(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in setup.__dataclass_fields__}


CHANGES: list[dict[str, Any]] = [
    {},
    {"enable_overlap": False},
    {"retract_interval": 4},
    {"retract_interval": 4, "enable_overlap": False, "page_size": 16},
    {"chunked_prefill_size": 3},
    {"num_pages": 130, "use_radix_cache": False},
]


@pytest.mark.long_matrix
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_outputs_match_and_are_the_same_beside_others_that_do_not_change(
    worker: Worker, sessions: GrammarSessions, plain: list[list[int]], changes: dict[str, Any]
) -> None:
    setup = Setup(**{**vars_of(SETUP_OF_STEPS), "enable_overlap": True, **changes})
    if setup.page_size != 1 or setup.num_pages != SETUP_OF_STEPS.num_pages:
        worker = make_model_worker(DEMO, setup, setup.context_len)
    alone = SchedulerHarness(setup, worker)
    free = alone.generate([PROMPT], **FREE)
    harness = SchedulerHarness(setup, worker, grammars=sessions)
    ids = submit_all(harness)
    free_id = harness.submit(PROMPT, **FREE)
    run(harness)
    assert outputs_of(harness, ids) == plain
    assert outputs_of(harness, [free_id]) == free
    if setup.retract_interval:
        assert all(harness.outputs[i].num_retractions for i in ids if len(plain[i - 1]) > 12)


@pytest.mark.long_matrix
@pytest.mark.parametrize("enable_overlap", [False, True])
def test_drafts_are_masked_as_single_tokens_are(
    sessions: GrammarSessions,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    enable_overlap: bool,
) -> None:
    """Verified multi-token prediction, and trees of drafts: the tokens of one at a time."""
    setup = Setup(**{**vars_of(SETUP_OF_STEPS), "enable_overlap": enable_overlap})
    runner = make_runner(DEMO, setup, setup.context_len, MTP_MAX_ROWS)
    ahead = {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True}
    monkeypatch.setitem(DRAFTERS.entries, "toy", PLACE)
    drafter = DrafterConfig("toy", NgramOptions(max_drafts=7, max_depth=3))
    runners, tree_setup = make_drafter_runners(DEMO, setup, drafter)
    ways = (
        (make_mtp_worker(runner, DEMO_MASK), setup, ahead),
        (make_worker(runners, drafter), tree_setup, {}),
    )
    for each, its_setup, more in ways:
        harness = SchedulerHarness(its_setup, each, grammars=sessions)
        ids = submit_all(harness, **more)
        run(harness)
        assert outputs_of(harness, ids) == plain
        assert sum(harness.outputs[i].num_proposed_drafts for i in ids) > 50


def test_logprobs_are_those_of_what_the_grammar_leaves(
    worker: Worker, sessions: GrammarSessions
) -> None:
    harness = SchedulerHarness(SETUP_OF_STEPS, worker, grammars=sessions)
    logprobs = LogprobOptions(start_len=len(PROMPT), top_num=5)
    req_id = harness.submit(PROMPT, logprobs=logprobs, regex="[01]", temperature=1.0)
    run(harness)
    first, last = harness.outputs[req_id].output_logprobs
    assert sum(math.exp(logprob) for logprob in first.top_logprobs[:2]) == pytest.approx(1)
    assert last.logprob == 0


def test_grammars_that_are_compiled_hold_nobody_up(
    worker: Worker, sessions: GrammarSessions
) -> None:
    """A request that waits for its grammar can be aborted, and others pass it."""
    harness = SchedulerHarness(SETUP_OF_STEPS, worker, grammars=sessions)
    slow = harness.submit(PROMPT, **{ENDLESS.kind: ENDLESS.text})
    free = harness.submit(PROMPT, **FREE)
    for _ in range(60):
        harness.step()
    assert harness.outputs[free].finish_reason is not None
    assert harness.outputs[slow].token_ids == []
    assert not harness.scheduler.control.has_work  # it waits, and looks again soon
    assert harness.scheduler.control.wait_s == pytest.approx(0.002)
    harness.inbox.messages.append(AbortReq(req_ids=[slow]))
    harness.run()
    reason = harness.outputs[slow].finish_reason
    assert reason is not None
    assert reason.type == "abort"
    sessions.close()  # so that nobody waits for what is compiled in vain


@pytest.mark.long_matrix
@pytest.mark.parametrize("delay", range(12, 24))
def test_a_grammar_that_is_ready_at_any_moment_is_not_overlooked(delay: int) -> None:
    """Whenever the last look at it was, the scheduler does not go to sleep for good."""
    harness = SchedulerHarness(
        Setup(),
        FakeWorker("plain", 1, 9, seed=0),
        grammars=CountedGrammars(12, max_delay=delay),  # type: ignore[arg-type]
    )
    req_id = harness.submit([1, 2, 3], regex="a", max_new_tokens=3)

    def wait(timeout_s: float | None) -> bool:
        assert timeout_s is not None, "nobody would wake it"
        return bool(harness.inbox.messages)

    harness.inbox.wait = wait  # type: ignore[method-assign]
    while harness.outputs[req_id].finish_reason is None:
        if harness.ongoing is None and not harness.scheduler.control.has_work:
            harness.scheduler._wait_for_message()
        harness.step()


def test_a_request_whose_grammar_fails_ends_alone_with_the_reason(
    worker: Worker, sessions: GrammarSessions
) -> None:
    """Its grammar allows only a token that nothing may emit."""
    harness = SchedulerHarness(SETUP_OF_STEPS, worker, grammars=sessions)
    bad = harness.submit(PROMPT, ebnf='start: "ab" <|mask|>')
    (good, is_match) = CASES["regex"]
    other = harness.submit(PROMPT, **{good.kind: good.text}, temperature=0.0)
    run(harness)
    reason = harness.outputs[bad].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert "no token" in str(reason.message)
    assert is_match(TOKENIZER.decode(harness.outputs[other].token_ids))


def test_the_end_of_text_ends_also_who_would_ignore_it(
    worker: Worker, sessions: GrammarSessions
) -> None:
    harness = SchedulerHarness(SETUP_OF_STEPS, worker, grammars=sessions)
    req_id = harness.submit(PROMPT, regex="abc", ignore_eos=True, max_new_tokens=50)
    run(harness)
    assert TOKENIZER.decode(harness.outputs[req_id].token_ids) == "abc"
