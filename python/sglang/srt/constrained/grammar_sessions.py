"""The grammars of running requests: the scheduler's side of the process that makes their masks.

Each request with a grammar has a `GrammarSession`. Compiling goes on while the request waits; each
step asks for the masks of all its requests at once. A request whose mask takes too long, or ends
the process, ends alone: the others go on in a new process, which gets their outputs so far.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sglang.srt.constrained.grammar_check import MODULE
from sglang.srt.constrained.grammar_messages import (
    CloseGrammar,
    GrammarSetup,
    Masks,
    MaskStep,
    Opened,
    OpenGrammar,
    Reply,
    Request,
    WantedMasks,
)
from sglang.srt.framed_process import FramedProcess
from sglang.srt.sampling.grammar import Grammar

logger = logging.getLogger(__name__)

MAX_MASK_SECONDS = 3.0  # for the masks of a step; some tenths of a millisecond each are usual
POLL_SECONDS = 0.001  # at most so often it is looked for what has been compiled
MAX_OPEN_SECONDS = 60.0  # the start of the process and of those before it in the queue included
TOO_LONG = (
    "the grammar takes too much time or memory at this place of the output; use a simpler one"
)


class GrammarSession:
    """The grammar of one request, from its arrival to its end.

    Attributes:
        problem: why the request must end; None as long as all is well.
    """

    def __init__(self, sessions: GrammarSessions, number: int, grammar: Grammar) -> None:
        self.problem: str | None = None
        self.sessions = sessions
        self.number = number
        self.grammar = grammar
        self.tokens: list[int] = []  # of the output, those that the process knows
        self.has_opened = False
        self.opened_at_s = time.monotonic()
        self.num_ends = 0  # of processes that ended while they worked for it

    @property
    def is_ready(self) -> bool:
        """Whether masks can be asked for without waiting for a compiler."""
        if not self.has_opened:
            self.sessions.poll()
        return self.has_opened

    def close(self) -> None:
        """The request has ended."""
        self.sessions.close_session(self)


@dataclass(frozen=True, slots=True)
class MaskQuestion:
    """What may a request be given next?

    Attributes:
        news: tokens of its output since the last question.
        drafts, parents: as in `DraftedTokens`.
    """

    session: GrammarSession
    news: Sequence[int]
    drafts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


class GrammarSessions:
    """All sessions of a scheduler. The process starts with the first one."""

    def __init__(self, setup: GrammarSetup, max_mask_seconds: float = MAX_MASK_SECONDS) -> None:
        self._setup = setup
        self._max_mask_seconds = max_mask_seconds
        self._numbers = itertools.count()
        self._sessions: dict[int, GrammarSession] = {}
        self._process: FramedProcess | None = None
        self._next_poll_s = 0.0
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def open(self, grammar: Grammar) -> GrammarSession:
        """A session for a new request, whose grammar a front end has found to be good. Returns at
        once."""
        session = GrammarSession(self, next(self._numbers), grammar)
        self._sessions[session.number] = session
        if not self._try_send(OpenGrammar(session.number, grammar, [])):
            self._restart()
        return session

    def close_session(self, session: GrammarSession) -> None:
        """Forgets a session; more than once does nothing."""
        if self._sessions.pop(session.number, None) is not None and self._process is not None:
            self._try_send(CloseGrammar(session.number))

    def poll(self) -> None:
        """Takes in what has been compiled, without waiting."""
        now = time.monotonic()
        if now < self._next_poll_s:
            return
        self._next_poll_s = now + POLL_SECONDS
        try:
            while self._process is not None and self._take(time.monotonic()) is not None:
                pass
        except EOFError:
            self._give_up_compiling(has_ended=True)
        limit_s = time.monotonic() - MAX_OPEN_SECONDS
        for session in list(self._sessions.values()):
            if not session.has_opened and session.opened_at_s < limit_s:
                self._give_up_compiling()

    def masks(self, questions: Sequence[MaskQuestion]) -> list[bytes | None]:
        """For each question 1 + len(drafts) rows of ceil(V / 32) int32, as in `AllowedTokens`, of
        the output with the news and of each draft. None where `session.problem` says why."""
        for question in questions:
            question.session.tokens += question.news
        found: list[bytes | None] = [None] * len(questions)
        left = [index for index, each in enumerate(questions) if each.session.problem is None]
        knows_news, has_retried = False, False
        while left:
            end = self._await_opened([questions[index].session for index in left])
            if end is not None:
                self._give_up_compiling(has_ended=end)
                knows_news = True
            elif not self._try_send(_step([questions[index] for index in left], knows_news)):
                if has_retried:  # the process dies whatever it is asked
                    self._fail(questions[left[0]].session)
                has_retried = knows_news = True
                self._restart()
            else:
                num_done, has_ended = self._read_masks(questions, left, found)
                if num_done < len(left):
                    self._blame(questions[left[num_done]].session, has_ended)
                    self._restart()
                left, knows_news = left[num_done:], True
            left = [index for index in left if questions[index].session.problem is None]
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _await_opened(self, sessions: Sequence[GrammarSession]) -> bool | None:
        """Waits until all of them are compiled, which only a new process needs. None: they are;
        else whether the process has ended."""
        deadline = time.monotonic() + MAX_OPEN_SECONDS
        try:
            while not all(session.has_opened for session in sessions):
                if self._take(deadline) is None:
                    return False
        except EOFError:
            return True
        return None

    def _read_masks(
        self,
        questions: Sequence[MaskQuestion],
        places: Sequence[int],
        found: list[bytes | None],
    ) -> tuple[int, bool]:
        """Fills in the answers to the questions at these places. How many came, and whether the
        process has ended."""
        deadline = time.monotonic() + self._max_mask_seconds
        for num_done, place in enumerate(places):
            try:
                answer = self._take_masks(deadline)
            except EOFError:
                return num_done, True
            if answer is None:
                return num_done, False
            if answer.error is None:
                found[place] = answer.bitmask
            else:
                problem = f"the grammar cannot be followed: {answer.error}"
                questions[place].session.problem = problem
        return len(places), False

    def _take_masks(self, deadline: float) -> Masks | None:
        """The next answer to a question; None if there is none by then."""
        while (reply := self._take(deadline)) is not None:
            if isinstance(reply, Masks):
                return reply
        return None

    def _take(self, deadline: float) -> Reply | None:
        """The next reply. Notes which sessions have been opened."""
        assert self._process is not None
        raw = self._process.receive(deadline)
        if raw is None:
            return None
        reply: Reply = self._decoder.decode(raw)
        if isinstance(reply, Opened) and reply.session in self._sessions:
            self._sessions[reply.session].has_opened = True
        return reply

    def _blame(self, session: GrammarSession, has_ended: bool) -> None:
        """The process worked for this session when it was given up, or ended: that somebody else
        may have done, so it is tried once more."""
        session.num_ends += has_ended
        if not has_ended or session.num_ends > 1:
            self._fail(session)

    def _fail(self, session: GrammarSession) -> None:
        logger.warning("A request's grammar was given up: %s.", TOO_LONG)
        session.problem = TOO_LONG
        session.has_opened = True
        self._sessions.pop(session.number, None)

    def _give_up_compiling(self, has_ended: bool = False) -> None:
        """The process has ended, or compiles for too long: it is at the first grammar that is not
        open yet."""
        first = next((each for each in self._sessions.values() if not each.has_opened), None)
        if first is not None:
            self._blame(first, has_ended)
        self._restart()

    def _restart(self) -> None:
        """A new process, which is told of all sessions."""
        self.close()
        for session in self._sessions.values():
            session.has_opened, session.opened_at_s = False, time.monotonic()
            self._try_send(OpenGrammar(session.number, session.grammar, session.tokens))

    def _try_send(self, request: Request) -> bool:
        """Sends a message; whether the process lives to get it."""
        if self._process is None:
            self._process = FramedProcess(MODULE)
            messages: list[msgspec.Struct] = [self._setup, request]
        else:
            messages = [request]
        try:
            for message in messages:
                self._process.send(msgspec.msgpack.encode(message))
        except EOFError:
            logger.warning("The process of grammars has ended; there will be another one.")
            return False
        return True


def _step(questions: Sequence[MaskQuestion], knows_news: bool) -> MaskStep:
    """The message of a step.

    Args:
        knows_news: the process is new, and has been told all tokens.
    """
    return MaskStep(
        [
            WantedMasks(
                each.session.number,
                [] if knows_news else list(each.news),
                each.drafts,
                each.parents,
            )
            for each in questions
        ]
    )
