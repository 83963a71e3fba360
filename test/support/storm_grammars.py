"""A grammar for storms: which tokens may come is counted from all tokens before, in no process of
its own, so that a seed gives the same round again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang.srt.constrained.grammar_sessions import MaskQuestion
from sglang.srt.sampling.grammar import Grammar

EVERYTHING = (-1).to_bytes(4, "little", signed=True)


def is_allowed(grammar: Grammar, output: Sequence[int], token: int) -> bool:
    """Two thirds of all tokens, never the same for long."""
    return (sum(output) + len(output) + len(grammar.text) + token) % 3 != 0


class CountedSession:
    """Has the form of a `GrammarSession`; ready after being asked a few times. Some of its masks
    are late, and come after being asked for a few times."""

    def __init__(self, sessions: CountedGrammars, grammar: Grammar, delay: int) -> None:
        self.sessions = sessions
        self.grammar = grammar
        self.problem: str | None = None
        self.tokens: list[int] = []
        self.sat_out = False
        self.question: MaskQuestion | None = None  # whose answer is late
        self._delay = delay
        self.num_closed = 0

    @property
    def is_ready(self) -> bool:
        self._delay -= 1
        return self._delay < 0

    def be_late(self) -> bool:
        """Tells whether the masks of a new question are late."""
        number = sum(self.tokens) + 3 * len(self.tokens)
        self._delay = number % 7 if number % 3 == 0 else 0
        return self._delay > 0

    def close(self) -> None:
        self.num_closed += 1


class CountedGrammars:
    """Has the form of `GrammarSessions`, over a vocabulary of up to 32 tokens.

    Args:
        max_delay: how often a session may say that it is not ready.
        are_late: whether masks may be.
    """

    num_entries = 1

    def __init__(self, vocab_size: int, max_delay: int = 12, are_late: bool = True) -> None:
        self._are_late = are_late
        self.num_late = self.num_partial = 0
        self._vocab_size = vocab_size
        self._max_delay = max_delay
        self.sessions: list[CountedSession] = []

    def open(self, grammar: Grammar) -> CountedSession:
        session = CountedSession(self, grammar, delay=self._max_delay - len(self.sessions) % 13)
        self.sessions.append(session)
        return session

    def ask(self, questions: Sequence[MaskQuestion]) -> None:
        for question in questions:
            session = _session_of(question)
            assert session.num_closed == 0, "a request that has ended is asked for"
            assert session.is_ready, "a grammar that is not ready is asked"
            session.tokens += question.news

    def answers(
        self, questions: Sequence[MaskQuestion], is_computed: Callable[[], bool]
    ) -> list[bytes | None]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: MaskQuestion) -> bytes | None:
        session = _session_of(question)
        asked, session.question = session.question, None
        if asked is None and self._are_late and session.be_late():
            session.question = question
            self.num_late += 1
            return None
        if asked is not None and asked.drafts != question.drafts:
            question = MaskQuestion(question.session, question.news)
            self.num_partial += 1
        ways: list[list[int] | None] = [list(session.tokens)]
        for draft, parent in zip(question.drafts, question.parents, strict=True):
            before = ways[parent]
            may_follow = before is not None and is_allowed(session.grammar, before, draft)
            ways.append([*before, draft] if before is not None and may_follow else None)
        return b"".join(self._mask(session.grammar, way) for way in ways)

    def _mask(self, grammar: Grammar, way: list[int] | None) -> bytes:
        if way is None:
            return EVERYTHING
        allowed = (t for t in range(self._vocab_size) if is_allowed(grammar, way, t))
        return sum(1 << token for token in allowed).to_bytes(4, "little")


def _session_of(question: MaskQuestion) -> CountedSession:
    assert isinstance(question.session, CountedSession)
    return question.session
