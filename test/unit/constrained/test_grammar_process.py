"""A grammar may take its process with it, never a server or another request."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import msgspec
import psutil
import pytest

from grammar_cases import BOTTOMLESS, CASES, DEMO, DEMO_EOS, ENDLESS, SETUP
from sglang.srt.constrained import grammar_process
from sglang.srt.constrained.grammar_check import GrammarCheck, GrammarRefused, _CheckProcess
from sglang.srt.constrained.grammar_messages import Verdict, WantedMasks
from sglang.srt.constrained.grammar_process import GrammarWork
from sglang.srt.constrained.grammar_sessions import (
    TOO_LONG,
    GrammarSession,
    GrammarSessions,
    MaskQuestion,
)
from sglang.srt.constrained.matchers import GrammarCompiler, GrammarError, Matcher
from sglang.srt.sampling.grammar import JSON_SCHEMA, REGEX, Grammar
from sglang.srt.tokenizer import load_tokenizer, read_tokenizer_json

QUICK = msgspec.structs.replace(SETUP, max_check_seconds=1)
GOOD = CASES["regex"][0]
TOKENIZER = load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(read_tokenizer_json(DEMO), SETUP.vocab_size, [DEMO_EOS])


@pytest.fixture
def sessions() -> Iterator[GrammarSessions]:
    made = GrammarSessions(msgspec.structs.replace(SETUP, max_request_seconds=1.0))
    yield made
    made.close()


def open_all(sessions: GrammarSessions, *grammars: Grammar) -> list[GrammarSession]:
    """Sessions that are ready."""
    made = [sessions.open(grammar) for grammar in grammars]
    deadline = time.monotonic() + 60
    while not all(session.is_ready for session in made):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return made


def masks_of(sessions: GrammarSessions, questions: Sequence[MaskQuestion]) -> list[bytes | None]:
    """The masks, however long they take."""
    sessions.ask(questions)
    deadline = time.monotonic() + 60
    while not all(question.session.is_ready for question in questions):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return sessions.answers(questions)


def child() -> psutil.Process:
    """The process of grammars; there is one."""
    (process,) = [
        each
        for each in psutil.Process().children()
        if any("grammar_process" in word for word in each.cmdline())
    ]
    return process


def seconds_of_ended_processes() -> float:
    """Processor time, which does not depend on what else the machine does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_hostile_grammars_are_refused_in_time_and_good_ones_still_checked() -> None:
    async def scenario() -> None:
        check = GrammarCheck(QUICK, max_processes=1)
        await check.check(GOOD)
        before = seconds_of_ended_processes()
        for hostile in (ENDLESS, BOTTOMLESS):
            with pytest.raises(GrammarRefused, match="too much memory, to compile"):
                await check.check(hostile)
        assert 0 < seconds_of_ended_processes() - before < 30
        with pytest.raises(GrammarRefused, match="too much memory"):
            check.check(ENDLESS).send(None)  # known by now: nothing is waited for
        await check.check(CASES["ebnf"][0])
        with pytest.raises(GrammarRefused, match="look-ahead"):
            await check.check(Grammar(REGEX, "a(?!b)"))
        check.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_check_of_its_grammar() -> None:
    async def scenario() -> None:
        check = GrammarCheck(SETUP, max_processes=1)
        await check.check(GOOD)
        working = asyncio.create_task(check.check(ENDLESS))
        await asyncio.sleep(0.2)
        process = child()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert not process.is_running()
        check.close()

    asyncio.run(scenario())


def test_masks_are_those_of_the_matcher(
    sessions: GrammarSessions, compiler: GrammarCompiler
) -> None:
    made = open_all(sessions, *(grammar for grammar, _ in CASES.values()))
    matchers = [compiler.compile(grammar) for grammar, _ in CASES.values()]
    outputs = [TOKENIZER.encode(text, add_special_tokens=False) for text in ('{"', "ab", "7 +")]
    for news in ([[], [], []], outputs):
        for matcher, tokens in zip(matchers, news, strict=True):
            matcher.consume(tokens)
        drafts = [[5, 9], [], [300]]
        questions = [
            MaskQuestion(session, tokens, ids, [0] * len(ids))
            for session, tokens, ids in zip(made, news, drafts, strict=True)
        ]
        expected = [m.masks(ids, [0] * len(ids)) for m, ids in zip(matchers, drafts, strict=True)]
        assert masks_of(sessions, questions) == expected


@pytest.mark.parametrize("stopped", [True, False])
def test_a_request_whose_mask_never_comes_ends_alone(
    sessions: GrammarSessions, compiler: GrammarCompiler, stopped: bool
) -> None:
    """The process hangs, or is ended; the others go on in a new one, which knows their outputs."""
    made = open_all(sessions, GOOD, GOOD, GOOD)
    first = TOKENIZER.encode("a", add_special_tokens=False)
    assert None not in masks_of(sessions, [MaskQuestion(each, first) for each in made])
    process = child()
    process.send_signal(signal.SIGSTOP if stopped else signal.SIGKILL)
    if not stopped:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    second = TOKENIZER.encode("b", add_special_tokens=False)
    masks = masks_of(sessions, [MaskQuestion(each, second) for each in made])
    expected = compiler.compile(GOOD)
    expected.consume([*first, *second])
    if stopped:  # the first is taken for the reason
        assert masks == [None, expected.masks(), expected.masks()]
        assert "more than the 1 s of --max-grammar-time-s" in str(made[0].problem)
        assert [each.problem for each in made[1:]] == [None, None]
    else:  # nobody had been asked
        assert masks == [expected.masks()] * 3
        assert [each.problem for each in made] == [None] * 3
    assert child().pid != process.pid


def test_a_grammar_that_ends_its_process_while_it_is_compiled_ends_its_request_alone(
    sessions: GrammarSessions,
) -> None:
    (good,) = open_all(sessions, GOOD)
    endless, other = sessions.open(ENDLESS), sessions.open(GOOD)
    deadline = time.monotonic() + 60
    for _ in range(2):  # the first time somebody else may have ended it
        while not good.is_ready:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.1)
        process = child()
        process.kill()
        process.wait()
        assert not endless.is_ready or endless.problem
    while not (endless.is_ready and other.is_ready):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    masks = masks_of(sessions, [MaskQuestion(each, []) for each in (good, endless, other)])
    assert [mask is None for mask in masks] == [False, True, False]
    assert [each.problem for each in (good, endless, other)] == [None, TOO_LONG, None]


def test_masks_do_not_wait_for_a_grammar_that_is_compiled(sessions: GrammarSessions) -> None:
    (ready,) = open_all(sessions, GOOD)
    slow = sessions.open(ENDLESS)
    time.sleep(0.05)
    question = MaskQuestion(ready, [])
    for _ in range(50):
        assert masks_of(sessions, [question]) != [None]
        assert not slow.is_ready
    slow.close()


def test_an_output_that_breaks_its_grammar_is_that_request_s_problem(
    sessions: GrammarSessions,
) -> None:
    wrong, right = open_all(sessions, GOOD, GOOD)
    token = TOKENIZER.encode("z", add_special_tokens=False)
    masks = masks_of(sessions, [MaskQuestion(wrong, token), MaskQuestion(right, [])])
    assert masks[0] is None
    assert masks[1] is not None
    assert "cannot be followed" in str(wrong.problem)
    again = masks_of(sessions, [replace(MaskQuestion(wrong, []))])
    assert again == [None]


def test_a_check_whose_process_is_killed_is_made_again_for_the_next_request() -> None:
    async def scenario() -> None:
        check = GrammarCheck(SETUP, max_processes=1)
        await check.check(GOOD)
        working = asyncio.create_task(check.check(ENDLESS))
        await asyncio.sleep(0.2)
        child().kill()
        with pytest.raises(GrammarRefused):
            await working
        assert ENDLESS not in check._verdicts
        await check.check(CASES["ebnf"][0])
        check.close()

    asyncio.run(scenario())


def test_a_check_whose_process_is_stopped_is_made_by_another() -> None:
    async def scenario() -> None:
        check = GrammarCheck(SETUP, max_processes=1)
        await check.check(GOOD)
        before = child()
        before.suspend()
        await asyncio.wait_for(check.check(CASES["ebnf"][0]), timeout=20)
        assert child() != before
        check.close()

    asyncio.run(scenario())


def test_a_process_that_died_while_nobody_used_it_is_replaced(sessions: GrammarSessions) -> None:
    [first] = open_all(sessions, GOOD)
    first.close()
    child().kill()
    time.sleep(0.3)
    [second] = open_all(sessions, GOOD)
    assert second.problem is None
    [mask] = masks_of(sessions, [MaskQuestion(second, [])])
    assert mask


@pytest.mark.parametrize("schema", ["true", "{}"])
def test_the_schema_of_anything_is_one(compiler: GrammarCompiler, schema: str) -> None:
    compiler.check(Grammar(JSON_SCHEMA, schema))
    with pytest.raises(GrammarError, match="schema false"):
        compiler.check(Grammar(JSON_SCHEMA, "false"))


def test_no_grammar_is_kept_in_a_process_that_has_become_large() -> None:
    work = GrammarWork(SETUP, io.BytesIO())
    with mock.patch.object(grammar_process, "resident_mib", return_value=0.0):
        for number in range(3):
            work._compiled(Grammar(REGEX, f"a{number}"))
    assert len(work._kept) == 3
    with mock.patch.object(grammar_process, "resident_mib", return_value=SETUP.max_memory_mib):
        work._compiled(Grammar(REGEX, "b"))
    assert list(work._kept) == [Grammar(REGEX, "b")]


def test_quick_masks_do_not_wait_for_a_slow_one() -> None:
    """In the process: each is a thread's work."""
    written = io.BytesIO()
    work = GrammarWork(SETUP, written)
    is_free = threading.Event()
    for session, masks in enumerate((lambda *_: is_free.wait(60) and b"slow", lambda *_: b"quick")):
        opened: Future[Matcher] = Future()
        opened.set_result(mock.Mock(masks=masks))
        work._sessions[session] = opened
    work.handle(WantedMasks(0, [], [], []))
    work.handle(WantedMasks(1, [], [], []))
    deadline = time.monotonic() + 60
    while b"quick" not in written.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert b"slow" not in written.getvalue()
    is_free.set()


def test_a_panic_of_the_library_is_told_from_an_error(compiler: GrammarCompiler) -> None:
    """Checks that masks tell of a panic, so that the process, with what the panic left behind, can
    be ended."""
    matcher = compiler.compile(GOOD)
    broken = mock.Mock(is_error=lambda: True, get_error=lambda: "panic: a lock <backtrace> lines")
    matcher._matcher = broken
    work = GrammarWork(SETUP, io.BytesIO())
    opened: Future[Matcher] = Future()
    opened.set_result(matcher)
    broken.is_stopped.return_value = False
    broken.consume_token.return_value = False
    masks = work._masks(WantedMasks(0, [1], [], []), opened)
    assert masks.has_panicked
    assert masks.error == "the library failed: a lock"


def test_a_process_of_checks_does_not_outlive_a_panic() -> None:
    process = _CheckProcess(SETUP)
    with mock.patch.object(process, "_process") as pipes:
        pipes.receive.return_value = msgspec.msgpack.encode(Verdict("the library failed", True))
        assert process.check(GOOD) == "the library failed"
        pipes.end.assert_called_once()
    process.close()
