"""Whether a grammar can be used: the front end asks processes of their own, before the request
goes on. No torch here."""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from sglang.srt.constrained.grammar_messages import CheckGrammar, GrammarSetup, Verdict
from sglang.srt.framed_process import FramedProcess, ProcessPool
from sglang.srt.sampling.grammar import Grammar

MODULE = "sglang.srt.constrained.grammar_process"
MAX_PROCESSES = 2
MAX_WALL_SECONDS = 30.0  # for a machine that is busy with something else
START_SECONDS = 60.0
NUM_VERDICTS = 512


class GrammarRefused(ValueError):
    """A grammar that cannot be used; the message says why."""


class _CheckProcess:
    """One process that checks. A failed or abandoned call leaves it ended."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._process = FramedProcess(MODULE)
        self._setup = setup
        self._is_new = True

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

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
        return msgspec.msgpack.decode(answer, type=Verdict).error

    def end(self) -> None:
        """Ends the process at once; a call that waits for it fails."""
        self._process.end()

    def close(self) -> None:
        """Ends it and frees its pipes, once no call uses them."""
        self._process.close()


class GrammarCheck:
    """Checks grammars, and remembers what it found of the last ones. A process starts with the
    first grammar, and ends with this one."""

    def __init__(self, setup: GrammarSetup, max_processes: int = MAX_PROCESSES) -> None:
        self._processes = ProcessPool(lambda: _CheckProcess(setup), max_processes)
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Returns when it is known to be good.

        Raises:
            GrammarRefused: if it is not.
        """
        if grammar not in self._verdicts:
            await self._processes.call(lambda process: self._check_once(process, grammar))
        reason = self._verdicts.pop(grammar)
        self._verdicts[grammar] = reason
        if len(self._verdicts) > NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        if reason is not None:
            raise GrammarRefused(reason)

    def _check_once(self, process: _CheckProcess, grammar: Grammar) -> None:
        """In a thread, when it is its turn: another request may have asked for the same."""
        if grammar not in self._verdicts:
            self._verdicts[grammar] = process.check(grammar)

    def close(self) -> None:
        """Ends the processes that wait for a grammar."""
        self._processes.close()
