"""Tests how many grammars wait for a check, and how long; the processes are fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from grammar_cases import SETUP
from sglang.srt.constrained import grammar_check
from sglang.srt.constrained.grammar_check import GrammarCheck, GrammarRefused, TooManyChecks
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.frontend.work_in_threads import check_grammars
from sglang.srt.sampling.grammar import REGEX, Grammar


class HeldProcess:
    """A process that gives its verdicts when `released` is set, or it is ended."""

    made: ClassVar[list[HeldProcess]]
    released: ClassVar[threading.Event]
    checked: ClassVar[list[str]]
    is_stopped = False

    def __init__(self, setup: Any) -> None:
        self.is_alive = True
        self._ended = threading.Event()
        self.made.append(self)

    def check(self, grammar: Grammar) -> str | None:
        while not self.released.wait(0.002):
            if self._ended.is_set():
                raise GrammarRefused("the process was ended")
        self.checked.append(grammar.text)
        return "is bad" if grammar.text.startswith("bad") else None

    def end(self) -> None:
        self.is_alive = False
        self._ended.set()

    def close(self) -> None:
        self.end()


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> type[HeldProcess]:
    monkeypatch.setattr(HeldProcess, "made", [], raising=False)
    monkeypatch.setattr(HeldProcess, "checked", [], raising=False)
    monkeypatch.setattr(HeldProcess, "released", threading.Event(), raising=False)
    monkeypatch.setattr(grammar_check, "_CheckProcess", HeldProcess)
    return HeldProcess


def run(scenario: Callable[[GrammarCheck], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        check = GrammarCheck(SETUP, max_processes=1, **limits)
        await asyncio.wait_for(scenario(check), 20)
        check.close()

    asyncio.run(main())


def start(check: GrammarCheck, text: str) -> asyncio.Task[None]:
    return asyncio.create_task(check.check(Grammar(REGEX, text)))


def test_more_grammars_than_may_wait_are_turned_away_at_once(held: type[HeldProcess]) -> None:
    async def scenario(check: GrammarCheck) -> None:
        waiting = [start(check, text) for text in ("a", "bad b", "c")]
        await asyncio.sleep(0.02)
        with pytest.raises(TooManyChecks, match="3 new grammars"):
            await check.check(Grammar(REGEX, "d"))
        held.released.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), GrammarRefused, type(None)]
        await check.check(Grammar(REGEX, "d"))  # there is room again
        assert held.checked == ["a", "bad b", "c", "d"]

    run(scenario, max_waiting=2)


def test_known_grammars_pass_a_full_queue(held: type[HeldProcess]) -> None:
    async def scenario(check: GrammarCheck) -> None:
        held.released.set()
        await check.check(Grammar(REGEX, "known"))
        with pytest.raises(GrammarRefused):
            await check.check(Grammar(REGEX, "bad"))
        held.released.clear()
        waiting = start(check, "a")
        await asyncio.sleep(0.02)
        await check.check(Grammar(REGEX, "known"))
        with pytest.raises(GrammarRefused, match="is bad"):
            await check.check(Grammar(REGEX, "bad"))
        with pytest.raises(TooManyChecks):
            await check.check(Grammar(REGEX, "new"))
        held.released.set()
        await waiting

    run(scenario, max_waiting=0)


def test_callers_of_one_grammar_share_a_check(held: type[HeldProcess]) -> None:
    async def scenario(check: GrammarCheck) -> None:
        callers = [start(check, "bad") for _ in range(20)]
        await asyncio.sleep(0.02)
        for caller in callers[:5]:
            caller.cancel()
        held.released.set()
        found = await asyncio.gather(*callers, return_exceptions=True)
        expected = [asyncio.CancelledError] * 5 + [GrammarRefused] * 15
        assert [type(each) for each in found] == expected
        assert held.checked == ["bad"]
        assert [process.is_alive for process in held.made] == [True]

    run(scenario, max_waiting=0)


def test_the_last_caller_that_leaves_ends_the_check_and_makes_room(
    held: type[HeldProcess],
) -> None:
    async def scenario(check: GrammarCheck) -> None:
        callers = [start(check, "a"), start(check, "a")]
        await asyncio.sleep(0.02)
        callers[0].cancel()
        await asyncio.sleep(0.02)
        assert held.made[0].is_alive
        callers[1].cancel()
        again = start(check, "a")  # in the same moment
        await asyncio.gather(*callers, return_exceptions=True)
        assert not held.made[0].is_alive
        held.released.set()
        await again
        assert held.checked == ["a"]
        assert len(held.made) == 2

    run(scenario, max_waiting=1)


def test_a_grammar_waits_only_so_long_and_one_that_is_worked_on_goes_on(
    held: type[HeldProcess],
) -> None:
    async def scenario(check: GrammarCheck) -> None:
        first, second = start(check, "a"), start(check, "b")
        with pytest.raises(TooManyChecks, match=r"waited for 0\.05 s"):
            await second
        assert not first.done()
        held.released.set()
        await first
        await check.check(Grammar(REGEX, "b"))

    run(scenario, max_queue_s=0.05)


def test_the_client_is_told_to_try_again_later() -> None:
    params = SimpleNamespace(sampling_params=SimpleNamespace(grammar=Grammar(REGEX, "b")))

    async def scenario(check: GrammarCheck) -> None:
        first = start(check, "a")
        await asyncio.sleep(0.02)
        request: Any = SimpleNamespace(prompts=[params])
        with pytest.raises(ServiceError, match=r"1 new grammars .* Try again later") as caught:
            await check_grammars(request, check)
        assert caught.value.status_code == 503
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(scenario, max_waiting=0)
