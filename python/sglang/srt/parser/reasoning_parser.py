"""Tells what a model thinks from what it answers, in an output that comes bit by bit.

A new format is an entry of REASONING_FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sglang.srt.parser.held_text import num_held


class Outset(Enum):
    """The state in which an output begins."""

    FREE = "reasoning may begin"
    OPEN = "reasoning has begun, and has no text yet"
    AMID = "reasoning goes on"
    CLOSED = "reasoning is over"

    @property
    def is_open(self) -> bool:
        return self in (Outset.OPEN, Outset.AMID)


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks by which a family of models shows what it thinks.

    Attributes:
        starts_open: after a prompt without a mark an output begins with reasoning, whether or not
            `start` is in it.
    """

    start: str = "<think>"
    end: str = "</think>"
    starts_open: bool = False

    def before_marks(self, text: str) -> str:
        """Returns a text up to its first mark; all of it, if there is none."""
        return text.partition(self.start)[0].partition(self.end)[0]

    def outset_after(self, turn: str) -> Outset:
        """Returns how an output begins: the last mark before it decides.

        Args:
            turn: the end of the prompt, after all that is over, such as the last user's message.
        """
        start, end = turn.rfind(self.start), turn.rfind(self.end)
        if start == end:  # there is no mark
            return Outset.OPEN if self.starts_open else Outset.FREE
        if start < end:
            return Outset.CLOSED
        thought = turn[start + len(self.start) :]
        return Outset.AMID if thought.strip() else Outset.OPEN


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(starts_open=True),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(starts_open=True),
}


class Parts(NamedTuple):
    """The new parts of an output."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Divides one output. White space around reasoning belongs to neither part.

    The pieces that `push` and `finish` return, appended, do not depend on how the text is cut.

    Args:
        outset: where the output begins. Reasoning that is open may begin with the start marker.
        gap: what stands between reasoning and content, if that is known; all other white space
            after reasoning is the content's.
    """

    def __init__(self, form: ReasoningFormat, outset: Outset, gap: str | None = None) -> None:
        self._form = form
        self._is_open = outset.is_open
        self._gap = gap
        self._text = ""  # not given out yet
        self._blanks: list[str] = []  # after it; they decide nothing
        self._at_start = outset is not Outset.AMID
        self._in_reasoning = self._has_reasoned = outset is Outset.AMID
        self._skips_space = False  # white space here is around reasoning

    @property
    def in_reasoning(self) -> bool:
        """Tells whether reasoning has begun and not ended."""
        return self._in_reasoning

    @property
    def has_begun(self) -> bool:
        """Tells whether reasoning has begun, be it over or not."""
        return self._has_reasoned

    @property
    def has_ended(self) -> bool:
        """Tells whether all that follows is content: reasoning is over, or there was none."""
        return not (self._at_start or self._in_reasoning)

    def push(self, text: str) -> Parts:
        """Adds text and returns what is certain now. A run of blanks is looked at once, however
        many pieces it comes in."""
        is_held = self._at_start or self._in_reasoning
        if is_held and not text.strip() and (not self._text or self._text[-1].isspace()):
            self._blanks.append(text)
            return Parts()
        self._text += "".join((*self._blanks, text))
        self._blanks = []
        if self._at_start and not self._begin():
            return Parts()
        reasoning = self._take_reasoning() if self._in_reasoning else ""
        return Parts(reasoning, "" if self._in_reasoning else self._take_content())

    def finish(self) -> Parts:
        """Returns what was held back, at the end of the output."""
        text, self._text = "".join((self._text, *self._blanks)), ""
        if self._skips_space:
            text = text.lstrip()
        if self._in_reasoning or (self._at_start and self._is_open):
            return Parts(reasoning=text.strip() if self._at_start else text.rstrip())
        return Parts(content=text)

    def _begin(self) -> bool:
        """Looks for the start marker, which only white space may precede; False: not known yet."""
        text, start = self._text.lstrip(), self._form.start
        if len(text) < len(start) and start.startswith(text):
            return False
        self._at_start = False
        has_start = text.startswith(start)
        self._in_reasoning = has_start or self._is_open
        self._has_reasoned = self._in_reasoning
        if self._in_reasoning:
            self._text = text.removeprefix(start)
            self._skips_space = True
        return True

    def _take_reasoning(self) -> str:
        self._skip_space()
        before, marker, after = self._text.partition(self._form.end)
        if marker:
            self._in_reasoning, self._skips_space, self._text = False, True, after
            return before.rstrip()
        certain = self._text[: len(self._text) - num_held(self._text, self._form.end)].rstrip()
        self._text = self._text[len(certain) :]
        return certain

    def _take_content(self) -> str:
        if self._skips_space and self._gap is not None:
            if len(self._text) < len(self._gap) and self._gap.startswith(self._text):
                return ""
            self._text, self._skips_space = self._text.removeprefix(self._gap), False
        self._skip_space()
        text, self._text = self._text, ""
        return text

    def _skip_space(self) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
