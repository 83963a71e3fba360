"""A grammar for storms: which tokens may come is counted from all tokens before, in no process of
its own, so that a seed gives the same round again."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.constrained.grammar_sessions import MaskQuestion
from sglang.srt.sampling.grammar import Grammar

EVERYTHING = (-1).to_bytes(4, "little", signed=True)


def is_allowed(grammar: Grammar, output: Sequence[int], token: int) -> bool:
    """Two thirds of all tokens, never the same for long."""
    return (sum(output) + len(output) + len(grammar.text) + token) % 3 != 0


class CountedSession:
    """Has the form of a `GrammarSession`; ready after being asked a few times."""

    def __init__(self, sessions: CountedGrammars, grammar: Grammar, delay: int) -> None:
        self.sessions = sessions
        self.grammar = grammar
        self.problem: str | None = None
        self.tokens: list[int] = []
        self._delay = delay
        self.num_closed = 0

    @property
    def is_ready(self) -> bool:
        self._delay -= 1
        return self._delay < 0

    def close(self) -> None:
        self.num_closed += 1


class CountedGrammars:
    """Has the form of `GrammarSessions`, over a vocabulary of up to 32 tokens.

    Args:
        max_delay: how often a session may say that it is not ready.
    """

    def __init__(self, vocab_size: int, max_delay: int = 12) -> None:
        self._vocab_size = vocab_size
        self._max_delay = max_delay
        self.sessions: list[CountedSession] = []

    def open(self, grammar: Grammar) -> CountedSession:
        session = CountedSession(self, grammar, delay=self._max_delay - len(self.sessions) % 13)
        self.sessions.append(session)
        return session

    def masks(self, questions: Sequence[MaskQuestion]) -> list[bytes | None]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: MaskQuestion) -> bytes:
        session = question.session
        assert isinstance(session, CountedSession)
        assert session.num_closed == 0, "a request that has ended is asked for"
        assert session.is_ready, "a grammar that is not compiled yet is asked"
        session.tokens += question.news
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
