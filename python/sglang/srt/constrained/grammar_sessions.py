"""The grammars of running requests: the scheduler's side of the process that makes their masks.

Each request with a grammar has a `GrammarSession`. Each step asks for the masks of its requests and
waits for them for a moment only; a mask that comes later is kept for the next step that asks. A
request whose masks take more time than all of a request's may ends, and so does one that ends the
process twice: the others go on in a new process, which gets their outputs so far.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sglang.srt.constrained.grammar_check import MODULE
from sglang.srt.constrained.grammar_messages import (
    MAX_SLOW_MASKS,
    CloseGrammar,
    GrammarSetup,
    Masks,
    Opened,
    OpenGrammar,
    Reply,
    Request,
    WantedMasks,
)
from sglang.srt.framed_process import FramedProcess
from sglang.srt.sampling.grammar import Grammar

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.001  # at most so often it is looked for what has come
MAX_OPEN_SECONDS = 60.0  # the start of the process and of those before it in the queue included
# Of a step's time, at most this share is waited for masks once the forward pass is done, and so
# much in any case: a message there and back and a mask of a usual grammar.
PATIENCE_SHARE, MIN_PATIENCE_S, MAX_PATIENCE_S = 0.05, 0.0003, 0.005
SLOW_SECONDS = 0.001  # of one question; some tenths of a millisecond are usual
MEMORY_OF_SLOWNESS = 0.7  # a question that took long counts so much less with each one after it
TOO_LONG = (
    "the grammar takes too much time or memory at this place of the output; use a simpler one"
)


class GrammarSession:
    """The grammar of one request, from its arrival to its end.

    Attributes:
        problem: why the request must end; None as long as all is well.
        tokens: of the output, those that have been told.
        sat_out: the last step that asked did without it, since its masks were late.
        used_s: seconds of a processor that its masks have taken.
    """

    def __init__(
        self, sessions: GrammarSessions, number: int, grammar: Grammar, now_s: float
    ) -> None:
        self.problem: str | None = None
        self.sessions = sessions
        self.number = number
        self.grammar = grammar
        self.tokens: list[int] = []
        self.sat_out = False
        self.used_s = 0.0
        self.has_opened = False
        self.opened_at_s = now_s
        self.num_told = 0  # of `tokens`, to the process
        self.question: MaskQuestion | None = None  # the last one
        self.answer: bytes | None = None  # to `question`
        self.num_ends = 0  # of processes that ended while they may have worked for it
        self._recent_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Tells whether a step may ask: there is nothing to wait for, or a problem to report."""
        if self.is_waiting:
            self.sessions.poll()
        return not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Tells whether it is not compiled yet, or what was asked last is not answered."""
        return self.problem is None and (not self.has_opened or self.is_asked)

    @property
    def is_asked(self) -> bool:
        return self.question is not None and self.answer is None

    @property
    def is_slow(self) -> bool:
        """Tells whether its masks took long lately."""
        return self._recent_s > SLOW_SECONDS

    def take_time(self, seconds: float) -> None:
        """Its masks have taken so much of a processor."""
        self.used_s += seconds
        self._recent_s = max(seconds, MEMORY_OF_SLOWNESS * self._recent_s)

    def close(self) -> None:
        """The request has ended."""
        self.sessions.close_session(self)


@dataclass(frozen=True, slots=True)
class MaskQuestion:
    """A question: which tokens may a request be given next?

    Attributes:
        news: tokens of its output since the last question.
        drafts, parents: as in `DraftedTokens`.
    """

    session: GrammarSession
    news: Sequence[int]
    drafts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


class Process(Protocol):
    """The part of `FramedProcess` that is used here."""

    def send(self, message: bytes) -> None: ...

    def receive(self, deadline: float) -> bytes | None: ...

    def close(self) -> None: ...


class GrammarSessions:
    """All sessions of a scheduler. The process starts with the first one.

    Args:
        clock: seconds; the deadlines of a process are by it.
        start: begins a process.
    """

    def __init__(
        self,
        setup: GrammarSetup,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[], Process] = lambda: FramedProcess(MODULE),
    ) -> None:
        self._setup = setup
        self._clock = clock
        self._start = start
        self._numbers = itertools.count()
        self._sessions: dict[int, GrammarSession] = {}
        self._process: Process | None = None
        self._unsent: list[GrammarSession] = []  # their questions wait for a turn
        self._working: dict[int, float] = {}  # the numbers of those sent, and since when
        self._next_poll_s = 0.0
        self._asked_at_s = clock()
        self._patience_s = MIN_PATIENCE_S
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @property
    def num_entries(self) -> int:
        """Entries of a mask, int32."""
        return -(-self._setup.vocab_size // 32)

    def open(self, grammar: Grammar) -> GrammarSession:
        """A session for a new request, whose grammar a front end has found to be good. Returns at
        once."""
        session = GrammarSession(self, next(self._numbers), grammar, self._clock())
        self._sessions[session.number] = session
        self._send_or_restart(OpenGrammar(session.number, grammar, []))
        return session

    def close_session(self, session: GrammarSession) -> None:
        """Forgets a session; more than once does nothing."""
        if self._sessions.pop(session.number, None) is None:
            return
        if session in self._unsent:
            self._unsent.remove(session)
        if self._process is not None:
            self._send_or_restart(CloseGrammar(session.number))

    def poll(self) -> None:
        """Takes in what has come, without waiting."""
        now = self._clock()
        if now < self._next_poll_s:
            return
        self._next_poll_s = now + POLL_SECONDS
        while self._receive(now):
            pass
        self._look_at_limits()

    def ask(self, questions: Sequence[MaskQuestion]) -> None:
        """Asks for the masks of a step. A request whose last answer was not taken yet is not
        asked again, whatever its drafts are now."""
        now = self._clock()
        patience_s = PATIENCE_SHARE * (now - self._asked_at_s)
        self._patience_s = min(max(patience_s, MIN_PATIENCE_S), MAX_PATIENCE_S)
        self._asked_at_s = now
        for question in questions:
            session = question.session
            session.tokens += question.news
            if session.problem is None and session.question is None:
                session.question = question
                self._unsent.append(session)
        self._send_questions()

    def answers(
        self, questions: Sequence[MaskQuestion], is_computed: Callable[[], bool] = lambda: True
    ) -> list[bytes | None]:
        """For each question of `ask` 1 + len(drafts) rows of ceil(V / 32) int32, as in
        `AllowedTokens`, of the output with the news and of each draft; only the first row if what
        was asked first had other drafts. None where it is late, or `session.problem` says why.

        Args:
            is_computed: see `TokenConstraint.allowed`; until then all answers are waited for, and
                a moment longer those that were quick lately.
        """
        sessions = [question.session for question in questions]
        while not is_computed() and any(session.is_waiting for session in sessions):
            self._receive(self._clock() + MIN_PATIENCE_S)
        deadline = self._clock() + self._patience_s
        while any(each.is_waiting and each.has_opened and not each.is_slow for each in sessions):
            if not self._receive(deadline):
                break
        self._look_at_limits()
        return [_take_answer(question) for question in questions]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _receive(self, deadline: float) -> bool:
        """Takes in the next reply, if there is one by then."""
        if self._process is None:
            return False
        try:
            raw = self._process.receive(deadline)
        except EOFError:
            self._has_ended()
            return False
        if raw is None:
            return False
        reply: Reply = self._decoder.decode(raw)
        if isinstance(reply, Opened) and reply.session in self._sessions:
            self._sessions[reply.session].has_opened = True
            self._send_questions()
        elif isinstance(reply, Masks):
            self._take_masks(reply)
        return True

    def _take_masks(self, masks: Masks) -> None:
        session = self._sessions.get(masks.session)
        if masks.has_panicked:
            self._has_ended(masks.session)
            return
        self._working.pop(masks.session, None)
        if session is not None:
            session.num_ends = 0
            session.answer = masks.bitmask
            session.take_time(masks.seconds)
            if masks.error is not None:
                session.problem = f"the grammar cannot be followed: {masks.error}"
            elif session.used_s > self._setup.max_request_seconds:
                self._fail(session, self._used_up(session.used_s))
        self._send_questions()

    def _send_questions(self) -> None:
        """Sends those questions whose turn it is. So many slow ones are worked on at a time; one
        that may have ended a process goes alone, so that it is known who does."""
        if any(each is not None and each.num_ends for each in self._at_work()):
            return
        opened = [each for each in self._unsent if each.has_opened]
        suspect = next((each for each in opened if each.num_ends), None)
        if suspect is not None:
            are_all_open = all(each.has_opened for each in self._sessions.values())
            if are_all_open and not self._working:
                self._send_question(suspect)
            return
        for session in opened:
            num_slow = sum(each is None or each.is_slow for each in self._at_work())
            if session.has_opened and not (session.is_slow and num_slow >= MAX_SLOW_MASKS):
                self._send_question(session)

    def _at_work(self) -> list[GrammarSession | None]:
        """Those whose questions are worked on; None for one that has ended meanwhile."""
        return [self._sessions.get(number) for number in self._working]

    def _send_question(self, session: GrammarSession) -> None:
        assert session.question is not None
        question, news = session.question, session.tokens[session.num_told :]
        session.num_told = len(session.tokens)
        self._unsent.remove(session)
        self._working[session.number] = self._clock()
        self._send_or_restart(
            WantedMasks(session.number, news, question.drafts, question.parents, session.is_slow)
        )

    def _look_at_limits(self) -> None:
        """Ends what has taken too long. What is compiled and what is worked on has not said yet how
        long it took; all of the time since it began counts."""
        now = self._clock()
        for number, since_s in self._working.items():
            session = self._sessions.get(number)
            used_s = now - since_s + (0.0 if session is None else session.used_s)
            if used_s > self._setup.max_request_seconds:
                self.close()
                if session is not None:
                    self._fail(session, self._used_up(used_s))
                self._restart()
                return
        first = next((each for each in self._sessions.values() if not each.has_opened), None)
        if first is not None and now - first.opened_at_s > MAX_OPEN_SECONDS:
            self.close()
            self._fail(first, TOO_LONG)
            self._restart()

    def _used_up(self, used_s: float) -> str:
        return (
            f"the masks of its grammar have taken {used_s:.1f} s, more than the"
            f" {self._setup.max_request_seconds:g} s of --max-grammar-time-s; use a simpler one"
        )

    def _has_ended(self, culprit: int | None = None) -> None:
        """The process has ended, or cannot go on. Whom it worked for may be the reason, and is
        tried once more.

        Args:
            culprit: whose question it was; None: not known.
        """
        logger.warning("The process of grammars has ended; there will be another one.")
        self.close()
        numbers = list(self._working) if culprit is None else [culprit]
        suspects = [each for each in map(self._sessions.get, numbers) if each is not None]
        is_known = len(suspects) == 1 and suspects[0].num_ends > 0
        if culprit is None and not is_known:
            compiled = (each for each in self._sessions.values() if not each.has_opened)
            suspects += itertools.islice(compiled, 1)
        for session in suspects:
            session.num_ends += 1
            if session.num_ends > 1:
                self._fail(session, TOO_LONG)
        self._restart()

    def _fail(self, session: GrammarSession, problem: str) -> None:
        session.problem = problem
        self.close_session(session)

    def _restart(self) -> None:
        """Replaces the process; the new one is told of all sessions."""
        self.close()
        self._working = {}
        sessions = list(self._sessions.values())
        self._unsent = [session for session in sessions if session.is_asked]
        for session in sessions:
            session.has_opened, session.opened_at_s = False, self._clock()
            session.num_told = len(session.tokens)
            self._try_send(OpenGrammar(session.number, session.grammar, session.tokens))

    def _send_or_restart(self, request: Request) -> None:
        if not self._try_send(request):
            self._has_ended()

    def _try_send(self, request: Request) -> bool:
        """Sends a message; whether the process lives to get it."""
        messages: list[msgspec.Struct] = [request]
        if self._process is None:
            self._process = self._start()
            messages = [self._setup, request]
        try:
            for message in messages:
                self._process.send(msgspec.msgpack.encode(message))
        except EOFError:
            return False
        return True


def _take_answer(question: MaskQuestion) -> bytes | None:
    """The answer for a step, whose drafts may not be those that were asked about."""
    session = question.session
    asked, answer = session.question, session.answer
    if session.problem is not None or asked is None or answer is None:
        return None
    session.question = session.answer = None
    if (asked.drafts, asked.parents) == (question.drafts, question.parents):
        return answer
    return answer[: len(answer) // (1 + len(asked.drafts))]
