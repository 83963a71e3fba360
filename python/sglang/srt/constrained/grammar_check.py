"""Checks whether a grammar can be used: the front end asks processes of their own, before the
request goes on. No torch here."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from sglang.srt.constrained.grammar_messages import CheckGrammar, GrammarSetup, Verdict
from sglang.srt.framed_process import FramedProcess, ProcessPool
from sglang.srt.sampling.grammar import Grammar

MODULE = "sglang.srt.constrained.grammar_process"
MAX_PROCESSES = 2
MAX_WALL_SECONDS = 30.0  # for a machine that is busy with something else
START_SECONDS = 60.0
NUM_VERDICTS = 512
MAX_WAITING = 64  # grammars, beside those that are worked on
MAX_QUEUE_SECONDS = 30.0


class GrammarRefused(ValueError):
    """A grammar that cannot be used; the message says why."""


class TooManyChecks(RuntimeError):
    """So many new grammars wait that this one is not looked at; later, or elsewhere, it may be."""


class _CheckProcess:
    """One process that checks. A failed or abandoned call leaves it ended."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._process = FramedProcess(MODULE)
        self._setup = setup
        self._is_new = True

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    @property
    def is_stopped(self) -> bool:
        return self._process.is_stopped

    def check(self, grammar: Grammar) -> str | None:
        """Why the grammar cannot be used; None if it can. To be called in a thread.

        Raises:
            GrammarRefused: if somebody ended the process, or it did not answer; another one may.
        """
        seconds, is_sure = MAX_WALL_SECONDS + START_SECONDS * self._is_new, False
        try:
            if self._is_new:
                self._is_new = False
                self._process.send(msgspec.msgpack.encode(self._setup))
            self._process.send(msgspec.msgpack.encode(CheckGrammar(grammar)))
            answer = self._process.receive(time.monotonic() + seconds)
        except (OSError, EOFError):
            answer, is_sure = None, self._process.ended_itself()
        if answer is None:
            self.end()
            reason = (
                f"takes more than {self._setup.max_check_seconds} s, or too much memory, to"
                " compile; use a smaller or a simpler one"
            )
            if is_sure:
                return reason
            raise GrammarRefused(reason)
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        if verdict.has_panicked:
            self.end()
        return verdict.error

    def end(self) -> None:
        """Ends the process at once; a call that waits for it fails."""
        self._process.end()

    def close(self) -> None:
        """Ends it and frees its pipes, once no call uses them."""
        self._process.close()


@dataclass
class _Check:
    """A check that goes on, or waits for a process.

    Attributes:
        num_callers: that want to know what it finds.
    """

    task: asyncio.Task[str | None]
    num_callers: int = 0


class GrammarCheck:
    """Checks grammars, and remembers what it found of the last ones. A process starts with the
    first grammar, and ends with this one.

    Args:
        max_processes: that work at a time.
        max_waiting: grammars that may wait for one of them; of a grammar's callers none counts but
            the first.
        max_queue_s: how long one may wait.
    """

    def __init__(
        self,
        setup: GrammarSetup,
        max_processes: int = MAX_PROCESSES,
        max_waiting: int = MAX_WAITING,
        max_queue_s: float = MAX_QUEUE_SECONDS,
    ) -> None:
        self._processes = ProcessPool(lambda: _CheckProcess(setup), max_processes)
        self._max_checks = max_processes + max_waiting
        self._max_queue_s = max_queue_s
        self._checks: dict[Grammar, _Check] = {}
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Returns when it is known to be good. The last caller that is cancelled ends the check.

        Raises:
            GrammarRefused: if it is not.
            TooManyChecks: if too many others wait, or it has waited too long.
        """
        known = grammar in self._verdicts
        reason = self._verdicts.pop(grammar) if known else await self._find(grammar)
        self._verdicts[grammar] = reason
        if len(self._verdicts) > NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        if reason is not None:
            raise GrammarRefused(reason)

    async def _find(self, grammar: Grammar) -> str | None:
        """Why the grammar cannot be used, by a check of which all its callers wait."""
        check = self._checks.get(grammar)
        if check is None:
            if len(self._checks) >= self._max_checks:
                raise TooManyChecks(f"{self._max_checks} new grammars are before it")
            check = _Check(asyncio.create_task(self._ask(grammar)))
            self._checks[grammar] = check
        check.num_callers += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.num_callers -= 1
            if check.num_callers == 0:
                del self._checks[grammar]  # first: whoever asks now begins another
                check.task.cancel()
                await asyncio.gather(check.task, return_exceptions=True)

    async def _ask(self, grammar: Grammar) -> str | None:
        try:
            return await self._processes.call(
                lambda process: process.check(grammar), self._max_queue_s
            )
        except TimeoutError:
            raise TooManyChecks(f"it has waited for {self._max_queue_s:g} s") from None

    def close(self) -> None:
        """Ends the processes that wait for a grammar."""
        self._processes.close()
