"""A process of grammars that is none: how long masks take is a script's, and so is the time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang.srt.constrained.grammar_messages import (
    GrammarSetup,
    Masks,
    Opened,
    OpenGrammar,
    Request,
    WantedMasks,
)

BITS = 32


class Clock:
    """Seconds that pass when somebody waits, or a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class ScriptedProcess:
    """Allows everything, in the time that the script says.

    Args:
        seconds_of: a mask of a grammar with this text takes, by the number of its request: a number
            of seconds, or what the reply has instead of a mask, at once; EOFError ends the process.
    """

    def __init__(
        self, clock: Clock, seconds_of: Callable[[str, int], float | Masks | type[EOFError]]
    ) -> None:
        self._clock = clock
        self._seconds_of = seconds_of
        self._replies: list[tuple[float, bytes]] = []
        self._texts: dict[int, str] = {}
        self._num_entries = 0
        self.asked: list[int] = []  # sessions, in the order of the questions
        self.has_ended = False

    def send(self, message: bytes) -> None:
        if self.has_ended:
            raise EOFError
        if not self._num_entries:
            setup = msgspec.msgpack.decode(message, type=GrammarSetup)
            self._num_entries = -(-setup.vocab_size // BITS)
            return
        request = msgspec.msgpack.decode(message, type=Request)
        if isinstance(request, OpenGrammar):
            self._texts[request.session] = request.grammar.text
            self._reply(0.0, Opened(request.session))
        elif isinstance(request, WantedMasks):
            self.asked.append(request.session)
            self._answer(request)

    def _answer(self, request: WantedMasks) -> None:
        found = self._seconds_of(self._texts[request.session], request.session)
        if isinstance(found, Masks):
            self._reply(0.0, found)
        elif isinstance(found, type):
            self.has_ended = True
        else:
            rows = b"\xff\xff\xff\xff" * self._num_entries * (1 + len(request.drafts))
            self._reply(found, Masks(request.session, rows, seconds=found))

    def receive(self, deadline: float) -> bytes | None:
        if self.has_ended:
            raise EOFError
        at_s, reply = min(self._replies, default=(float("inf"), b""))
        if at_s > max(deadline, self._clock.now_s):
            self._clock.now_s = max(deadline, self._clock.now_s)
            return None
        self._replies.remove((at_s, reply))
        self._clock.now_s = max(at_s, self._clock.now_s)
        return reply

    def close(self) -> None:
        self.has_ended = True

    def _reply(self, after_s: float, reply: Opened | Masks) -> None:
        self._replies.append((self._clock.now_s + after_s, msgspec.msgpack.encode(reply)))
