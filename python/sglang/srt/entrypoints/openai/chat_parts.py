"""One choice of a chat: its output divided into reasoning, content and calls, as it comes."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.formats import CallFormat
from sglang.srt.function_call.function_call_parser import FunctionCall, FunctionCallParser
from sglang.srt.parser.reasoning_parser import Outset, Parts, ReasoningFormat, ReasoningParser
from sglang.srt.tokenizer import DecodeStream

PIECE_CHARS = 4096
ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class Division:
    """The rules by which the outputs of a chat are divided.

    Attributes:
        reasoning: None: nothing is told apart.
        outset: where outputs begin.
        gap: what stands between reasoning and content, if that is known.
        streams_reasoning: false: it is given out when it has ended.
        calls: None: nothing is a call.
        names: of the functions.
    """

    reasoning: ReasoningFormat | None = None
    outset: Outset = Outset.FREE
    gap: str | None = None
    streams_reasoning: bool = True
    calls: CallFormat | None = None
    names: frozenset[str] = frozenset()
    max_calls: int | None = None


@dataclass
class News:
    """The new parts of a choice.

    Attributes:
        calls: as OpenAI has them, with their places among the calls of the choice.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] | None = None

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ReasoningTokens:
    """Counts the tokens of one output that are reasoning: those up to the end of its mark, or
    all."""

    def __init__(self, form: ReasoningFormat, outset: Outset, stream: DecodeStream) -> None:
        self._parser = ReasoningParser(form, outset)
        self._stream = stream
        self._num_tokens = 0
        self._has_begun = outset.is_open
        self._has_ended = False

    @property
    def count(self) -> int:
        return self._num_tokens if self._has_begun else 0

    def update(self, output_ids: list[int]) -> None:
        """Looks at what is new of the ids of the output so far. Nothing is, once it has ended."""
        for token_id in output_ids[self._num_tokens :] if not self._has_ended else ():
            self._num_tokens += 1
            self._parser.push(self._stream.push([token_id]))
            self._has_begun = self._has_begun or self._parser.has_begun
            if self._parser.has_ended:
                self._has_ended = True
                break


class ChoiceParts:
    """The parts of one choice.

    Attributes:
        has_begun: its first chunk is out.
        num_tokens: of the output, those whose ids and log-probabilities are out.
        num_calls: that were found.
    """

    def __init__(self, division: Division) -> None:
        self.has_begun = False
        self.num_tokens = 0
        self.num_calls = 0
        self._division = division
        self._num_chars = 0
        self._kept_reasoning = ""
        self._reasoning = self._calls = None
        if division.reasoning is not None:
            self._reasoning = ReasoningParser(division.reasoning, division.outset, division.gap)
        if division.calls is not None:
            self._calls = FunctionCallParser(division.calls, division.names, division.max_calls)

    def news(self, text: str, has_ended: bool) -> News:
        """Returns what is new.

        Args:
            text: the whole output so far.
        """
        if self._reasoning is None and self._calls is None:
            start, self._num_chars = self._num_chars, len(text)
            return News(content=text[start:])
        news = News()
        for parts in self._parts(text, has_ended):
            news.reasoning += self._reasoning_now(parts.reasoning, has_ended)
            self._add_content(news, parts.content)
        if has_ended and self._calls is not None:
            content, calls = self._calls.finish()
            self._add(news, content, calls)
        return news

    def _parts(self, text: str, has_ended: bool) -> Iterator[Parts]:
        """Yields what is new, in pieces: the parsers copy what they have not given out."""
        for start in range(self._num_chars, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            yield Parts(content=piece) if self._reasoning is None else self._reasoning.push(piece)
        self._num_chars = len(text)
        if has_ended and self._reasoning is not None:
            yield self._reasoning.finish()

    def _reasoning_now(self, text: str, has_ended: bool) -> str:
        if self._division.streams_reasoning:
            return text
        self._kept_reasoning += text
        if not has_ended and self._reasoning is not None and self._reasoning.in_reasoning:
            return ""
        text, self._kept_reasoning = self._kept_reasoning, ""
        return text

    def _add_content(self, news: News, text: str) -> None:
        if self._calls is None:
            news.content += text
        else:
            self._add(news, *self._calls.push(text))

    def _add(self, news: News, content: str, calls: list[FunctionCall]) -> None:
        news.content += content
        for call in calls:
            if news.calls is None:
                news.calls = []
            news.calls.append(self._in_openai_form(call))
            self.num_calls += 1

    def _in_openai_form(self, call: FunctionCall) -> dict[str, Any]:
        assert self._division.calls is not None
        size = self._division.calls.id_chars
        short = "".join(secrets.choice(ID_CHARS) for _ in range(size))
        return {
            "index": self.num_calls,
            "id": short or f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
