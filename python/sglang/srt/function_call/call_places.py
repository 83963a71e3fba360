"""Finds where a call may begin in a text: at its marker, or alone where that can only mean a
call."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import NamedTuple

from sglang.srt.function_call.formats import CallFormat
from sglang.srt.parser.held_text import num_held

_BLANKS = re.compile(r"[ \t]+")
# After a colon that ends a key (`"call": {`) an object is a value.
_ALONE = r"""(?:(?P<line>\n[ \t]*)|(?:[.!?]|[^\s"'`]:)[ \t]+|[。！？：][ \t]*)(?=[{\[`])"""
# What may stand between an object and the end of its line, or the next object.
_IN_LINE, _BETWEEN_CALLS = " \t]", ",; \t\r\n"
_NUM_BEFORE = 3  # characters before an object, its blanks as one, that _ALONE looks at


class Begins(Enum):
    """Tells what a call begins with: a marker or, without one, its object, on a line of its own or
    after a sentence on the same line."""

    MARKER = "after a marker"
    LINE = "an object alone, at the beginning of a line"
    SENTENCE = "an object alone, after a sentence on its line"


class Place(NamedTuple):
    """Names a place where a call begins, and the characters of its marker, which are none before
    an object alone."""

    how: Begins
    start: int
    end: int


class CallPlaces:
    """Finds where calls may begin in a text that comes bit by bit."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._begin = _beginnings(form)
        self._before = "\n"  # the end of what has been passed

    def find(self, text: str) -> Place | None:
        """The first place in what follows the text that has been passed."""
        num_before = len(self._before)
        for match in self._begin.finditer(self._before + text):
            start, end = match.start() - num_before, match.end() - num_before
            if match["marker"] and start >= 0:
                return Place(Begins.MARKER, start, end)
            if not match["marker"] and end >= 0:
                return Place(Begins.LINE if match["line"] else Begins.SENTENCE, end, end)
        return None

    def num_certain(self, text: str) -> int:
        """Counts the first characters of a text without a place that are content, whatever follows:
        those before a part of a marker, or of a mark that ends outputs."""
        held = [num_held(text, self._form.marker)]
        for mark in self._form.ends:
            held.append(len(mark) if text.endswith(mark) else num_held(text, mark))
        return len(text) - max(held)

    def pass_text(self, text: str) -> None:
        """Goes on after a text."""
        self._before = _BLANKS.sub(" ", self._before + text)[-_NUM_BEFORE:]

    def pass_call(self) -> None:
        """Goes on after a call: what follows it is as at the beginning of a line."""
        self._before = "\n"

    def goes_on_as_call(self, after: str, has_ended: bool) -> bool | None:
        """Tells whether an object after a sentence is a call: its line ends with it, or calls
        follow. None: not known yet."""
        rest = after.lstrip(_IN_LINE)
        next_object = rest.lstrip(_BETWEEN_CALLS)
        marks = (self._form.marker, *self._form.ends)
        if not rest or rest[0] in "\r\n" or next_object.startswith(("{", *marks)):
            return True if rest or has_ended else None
        is_open = not next_object or any(mark.startswith(next_object) for mark in marks)
        return None if is_open and not has_ended else False

    def undecided(self, after: str) -> str:
        """The characters that still leave it unknown, if they come next."""
        rest = after.lstrip(_IN_LINE)
        if not rest:
            return _IN_LINE
        return "" if rest.lstrip(_BETWEEN_CALLS) else _BETWEEN_CALLS


@cache
def _beginnings(form: CallFormat) -> re.Pattern[str]:
    alone = f"|{_ALONE}" if form.is_bare else "|(?P<line>(?!))"
    return re.compile(f"(?P<marker>{re.escape(form.marker)}){alone}")
