"""Tells what a model thinks from what it answers, in an output that comes bit by bit.

A new format is an entry of REASONING_FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.parser.held_text import num_held


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks what it thinks.

    Attributes:
        starts_open: an output begins with reasoning, whether or not `start` is in it or in the
            prompt.
    """

    start: str = "<think>"
    end: str = "</think>"
    starts_open: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Whether reasoning goes on where a prompt ends, as some templates begin it."""
        return prompt.rstrip().endswith(self.start)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(starts_open=True),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(starts_open=True),
}


class Parts(NamedTuple):
    """What is new of an output."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Divides one output. White space around reasoning belongs to neither part.

    The pieces that `push` and `finish` return, appended, do not depend on how the text is cut.

    Args:
        is_open: the output begins with reasoning, with or without the start marker.
    """

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        self._form = form
        self._is_open = is_open
        self._text = ""  # not given out yet
        self._blanks: list[str] = []  # behind it; they decide nothing
        self._at_start = True
        self._in_reasoning = False
        self._skips_space = False  # white space here is around reasoning
        self._has_reasoned = False

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._in_reasoning

    @property
    def has_begun(self) -> bool:
        """Whether reasoning has begun, be it over or not."""
        return self._has_reasoned

    @property
    def has_ended(self) -> bool:
        """Whether all that follows is content: reasoning is over, or there was none."""
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
        """What was held back, at the end of the output."""
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
        self._skip_space()
        text, self._text = self._text, ""
        return text

    def _skip_space(self) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
