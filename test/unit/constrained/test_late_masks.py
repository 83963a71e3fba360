"""Masks that take long delay their own request, and nobody else: by a clock that is not the real
one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_checks import are_same_scores
from scripted_masks import Clock, ScriptedProcess
from sglang.srt.constrained.grammar_messages import MAX_SLOW_MASKS, GrammarSetup, Masks
from sglang.srt.constrained.grammar_sessions import (
    MAX_PATIENCE_S,
    POLL_SECONDS,
    TOO_LONG,
    GrammarSession,
    GrammarSessions,
    MaskQuestion,
)
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.sampling.grammar import REGEX, Grammar
from sglang.srt.step.worker import Worker
from storm_grammars import CountedGrammars
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_model_worker, make_mtp_worker
from utils import make_runner as make_model_runner

VOCAB_SIZE, MASK = 6, 5
NUM_NEW = 12
SLOW, QUICK, BAD = "slow", "quick", "bad"
SLOW_S = 2.0
SETUP = GrammarSetup(tokenizer_path="", vocab_size=VOCAB_SIZE, eos_token_ids=[])
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": NUM_NEW}


class Source:
    """The sessions over processes that follow a script; `processes` are all that were begun."""

    def __init__(
        self, seconds_of: Callable[[str, int], Any] = lambda text, _: SLOW_S * (text == SLOW)
    ) -> None:
        self.clock = Clock()
        self.processes: list[ScriptedProcess] = []
        self._seconds_of = seconds_of
        self.sessions = GrammarSessions(SETUP, self.clock, self._start)

    def _start(self) -> ScriptedProcess:
        self.processes.append(ScriptedProcess(self.clock, self._seconds_of))
        return self.processes[-1]

    def open(self, *texts: str) -> list[GrammarSession]:
        made = [self.sessions.open(Grammar(REGEX, text)) for text in texts]
        self.poll()
        assert all(session.has_opened for session in made)
        return made

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Lets time pass, and takes in what has come."""
        self.clock.now_s += seconds
        self.sessions.poll()

    def masks(self, sessions: list[GrammarSession]) -> list[bool]:
        """Asks as a step does; who is given a mask."""
        questions = [MaskQuestion(session, []) for session in sessions]
        self.sessions.ask(questions)
        return [answer is not None for answer in self.sessions.answers(questions)]


@pytest.fixture(scope="module", params=["plain", "drafts"])
def worker(request: pytest.FixtureRequest, small_model: Path) -> tuple[Worker, dict[str, Any]]:
    """A worker, and what a request says to be drafted for."""
    setup = Setup()
    if request.param == "plain":
        return make_model_worker(small_model, setup), {}
    runner = make_model_runner(small_model, setup, setup.context_len, MTP_MAX_ROWS)
    ahead = {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True}
    return make_mtp_worker(runner, MASK), ahead


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_beside_late_masks_a_plain_request_gets_a_token_in_every_step(
    worker: tuple[Worker, dict[str, Any]], enable_overlap: bool
) -> None:
    """And who sat out gets the tokens that it gets without delay, some with another's seed too."""
    setup, (model, ahead) = Setup(enable_overlap=enable_overlap), worker
    expected: list[list[int]] = []
    for slow in (QUICK, SLOW):
        source = Source()
        harness = SchedulerHarness(setup, model, grammars=source.sessions)
        late = [
            harness.submit([1, 2, 3], regex=slow, sampling_seed=seed, **SAMPLED, **ahead)
            for seed in (1, 2)
        ]
        harness.step()
        source.poll()
        plain = harness.submit([4, 2], sampling_seed=3, **SAMPLED)
        began_s, num_steps = source.clock.now_s, harness.num_steps
        while harness.outputs[plain].finish_reason is None:
            harness.step()
        if slow == SLOW:
            assert harness.num_steps - num_steps <= NUM_NEW + 1 + enable_overlap
            assert source.clock.now_s - began_s <= MAX_PATIENCE_S * NUM_NEW
            assert [harness.outputs[i].token_ids for i in late] == [[], []]
            assert not harness.scheduler.control.has_work  # it waits, and does not turn in circles
            assert harness.scheduler.control.wait_s == pytest.approx(0.002)
        while not harness.is_idle:
            source.clock.now_s += SLOW_S
            harness.step()
        expected.append([tok for i in (*late, plain) for tok in harness.outputs[i].token_ids])
        assert harness.scheduler.stats.num_sat_out >= (slow == SLOW) * 2 * 3
    assert expected[0] == expected[1]


@pytest.mark.long_matrix
@pytest.mark.parametrize("chunk", [2, 64])
def test_scores_and_hidden_states_are_those_of_a_request_that_never_sat_out(
    worker: tuple[Worker, dict[str, Any]], chunk: int
) -> None:
    """Each position has them once, though a row of the prompt, or of a token, is fed again."""
    model, ahead = worker
    found: list[list[tuple[Any, ...]]] = []
    for are_late in (False, True):
        grammars = CountedGrammars(VOCAB_SIZE, are_late=are_late)
        setup = Setup(chunked_prefill_size=chunk)
        harness = SchedulerHarness(setup, model, grammars=grammars)  # type: ignore[arg-type]
        scores = LogprobOptions(start_len=0, top_num=2)
        asked: list[dict[str, Any]] = [
            {"logprobs": scores, "hidden_states": "all"},
            {"logprobs": scores, "hidden_states": "last", "frequency_penalty": 0.9},
        ]
        ids = [
            harness.submit([1, 2, 3, 4, seed], regex="a", sampling_seed=seed, **how, **SAMPLED)
            for seed in range(4)
            for how in (asked[0], asked[1] | ahead)
        ]
        harness.run()
        outcomes = [harness.outputs[req_id] for req_id in ids]
        assert all(len(each.hidden_states) == NUM_NEW + 4 for each in outcomes[::2])
        hidden = [np.array(each.hidden_states) for each in outcomes]
        found.append(
            [
                (o.token_ids, rows, o.input_logprobs, o.output_logprobs)
                for o, rows in zip(outcomes, hidden, strict=True)
            ]
        )
        assert (grammars.num_late > 10) == are_late
    for plain, late in zip(*found, strict=True):
        assert late[0] == plain[0]
        np.testing.assert_allclose(late[1], plain[1], rtol=1e-3, atol=1e-3)
        for left, right in zip(late[2:], plain[2:], strict=True):
            assert are_same_scores(left, right)


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_a_request_whose_masks_are_late_can_be_aborted(
    worker: tuple[Worker, dict[str, Any]], enable_overlap: bool
) -> None:
    source = Source()
    setup = Setup(enable_overlap=enable_overlap)
    harness = SchedulerHarness(setup, worker[0], grammars=source.sessions)
    late = harness.submit([1, 2, 3], regex=SLOW, **SAMPLED)
    for _ in range(4):
        source.poll()
        harness.step()
    assert harness.scheduler.lifecycle.awaits_grammars
    harness.inbox.messages.append(AbortReq(req_ids=[late]))
    harness.run()
    reason = harness.outputs[late].finish_reason
    assert reason is not None
    assert reason.type == "abort"


def test_a_request_that_uses_up_its_time_ends_and_says_how_much_that_was(
    small_model: Path,
) -> None:
    """30 s of masks that come, 7 s each; another goes on."""
    source, setup = Source(lambda text, _: 7.0 * (text == SLOW)), Setup()
    harness = SchedulerHarness(
        setup, make_model_worker(small_model, setup), grammars=source.sessions
    )
    late = harness.submit([1, 2, 3], regex=SLOW, **SAMPLED)
    other = harness.submit([1, 2, 3], regex=QUICK, **SAMPLED)
    while not harness.is_idle:
        source.poll(7.0)
        harness.step()
    reason = harness.outputs[late].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert "have taken 35.0 s, more than the 30 s of --max-grammar-time-s" in str(reason.message)
    assert len(harness.outputs[late].token_ids) == 4
    assert len(harness.outputs[other].token_ids) == NUM_NEW
    assert len(source.processes) == 1
    state = harness.scheduler.control.internal_state()
    assert (state["num_ended_by_grammars"], state["num_sat_out"]) == (1, 5)


def test_a_mask_that_never_comes_ends_its_request_and_the_process() -> None:
    source = Source(lambda text, _: 1e9 * (text == SLOW))
    slow, quick = source.open(SLOW, QUICK)
    assert source.masks([slow, quick]) == [False, True]
    for _ in range(3):
        source.poll(10.1)
    assert "have taken 30.3 s" in str(slow.problem)
    assert slow.is_ready  # to report it
    assert len(source.processes) == 2
    source.poll()
    assert source.masks([slow, quick]) == [False, True]
    assert quick.problem is None


def test_slow_masks_are_worked_on_a_few_at_a_time_and_not_waited_for() -> None:
    source = Source()
    slow = source.open(*[SLOW] * (MAX_SLOW_MASKS + 3))
    (quick,) = source.open(QUICK)
    source.masks(slow)  # now it is known that they are
    source.poll(SLOW_S)
    assert all(session.is_ready for session in slow)
    assert source.masks(slow) == [True] * len(slow)
    process, before_s = source.processes[0], source.clock.now_s
    process.asked.clear()
    assert source.masks([*slow, quick]) == [False] * len(slow) + [True]
    assert source.clock.now_s == before_s
    assert len(process.asked) == MAX_SLOW_MASKS + 1
    for num_done in range(MAX_SLOW_MASKS, len(slow), MAX_SLOW_MASKS):
        assert sum(session.is_ready for session in slow) == num_done - MAX_SLOW_MASKS
        source.poll(SLOW_S)
    assert len(process.asked) == len(slow) + 1


def test_an_answer_to_other_drafts_is_good_for_the_certain_token() -> None:
    source = Source()
    (slow,) = source.open(SLOW)
    asked = MaskQuestion(slow, [], [3, 4], [0, 1])
    source.sessions.ask([asked])
    assert source.sessions.answers([asked]) == [None]
    source.poll(SLOW_S)
    now = MaskQuestion(slow, [], [3, 3], [0, 1])
    source.sessions.ask([now])
    (answer,) = source.sessions.answers([now])
    assert answer == b"\xff" * 4


@pytest.mark.parametrize("panics", [False, True])
def test_who_ends_the_process_twice_ends_and_nobody_else(panics: bool) -> None:
    """All whom it may have worked for are asked one at a time in the next one."""

    def seconds_of(text: str, session: int) -> Any:
        if text != BAD:
            return 0.0005
        return Masks(session, error="the library failed", has_panicked=True) if panics else EOFError

    source = Source(seconds_of)
    made = source.open(QUICK, BAD, QUICK, QUICK)
    source.masks(made)
    for _ in range(6):
        source.poll(0.001)
    assert [session.problem for session in made] == [None, TOO_LONG, None, None]
    assert len(source.processes) == 3
    if not panics:
        first, second = (process.asked for process in source.processes[:2])
        assert set(first) == {0, 1}
        assert second == [0, 1]
    assert source.masks(made) == [True, False, True, True]
