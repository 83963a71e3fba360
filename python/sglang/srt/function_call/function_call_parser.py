"""Finds calls of functions in an output that comes bit by bit.

A call is given out when its object is complete and certain. Until then its text is held back: what
turns out to be no call, such as broken JSON, is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sglang.srt.function_call.call_objects import FunctionCall, call_object
from sglang.srt.function_call.call_places import Begins, CallPlaces
from sglang.srt.function_call.formats import ARGUMENTS_MARK, CALL_ID_MARK, CallFormat
from sglang.srt.function_call.json_scanner import Found, JsonScanner
from sglang.srt.function_call.spaced_content import SpacedContent

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
# Each with what is of no matter after it.
_MARKS_OF_NAMES = (
    (CALL_ID_MARK, re.compile(r"\s*[A-Za-z0-9_-]{0,64}\s*")),
    (ARGUMENTS_MARK, re.compile(r"\s*")),
)
_SEPARATORS = (",", ";")
_FENCE = "```"
_JSON_FENCE = "```json"


class Pieces(NamedTuple):
    """The new pieces of an output, in its order but for the calls, which come after the content."""

    content: str
    calls: list[FunctionCall]


class _In(Enum):
    TEXT = "text"
    AROUND = "before an object or behind one"
    NAME = "a name before an object"
    OBJECT = "an object"


@dataclass
class _Calls:
    """Calls after one marker, or alone.

    Attributes:
        has_separator: after the last call.
    """

    begin: Begins
    has_call: bool = False
    has_separator: bool = False
    list_is_open: bool = False
    fence_is_open: bool = False


class FunctionCallParser:
    """Divides one output into content and calls.

    The pieces that `push` and `finish` return, appended, do not depend on how the text is cut.
    Content without calls is the text itself; SpacedContent says what becomes of the white space
    around calls.

    Args:
        names: of the functions that the client has told of.
        max_calls: more are dropped.
    """

    def __init__(
        self, form: CallFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        self._text = ""  # not looked at yet, but for what the scanner has read
        self._behind: list[str] = []  # what follows it and decides nothing, such as blanks
        self._idle: str | None = None  # characters that decide nothing now; None: white space
        self._held: list[str] = []  # looked at, and content if no call comes of it
        self._state = _In.TEXT
        self._places = CallPlaces(form)
        self._around = _Calls(Begins.MARKER)
        self._scanner = JsonScanner()
        self._name: str | None = None  # before the object
        self._content = SpacedContent()
        self._calls: list[FunctionCall] = []
        self._steps: dict[_In, Callable[[], bool]] = {
            _In.TEXT: self._read_text,
            _In.AROUND: self._read_around,
            _In.NAME: self._read_name,
            _In.OBJECT: self._read_object,
        }

    def push(self, text: str) -> Pieces:
        """Adds text and returns what is certain now. A run of blanks is looked at once, however
        many pieces it comes in."""
        if self._waits and not text.strip(self._idle):
            self._behind.append(text)
        else:
            self._read(text)
        return self._take()

    @property
    def _waits(self) -> bool:
        """Tells whether something must come that is no blank."""
        return self._state in (_In.NAME, _In.OBJECT) or (
            self._state is _In.AROUND and not self._text
        )

    def _read(self, text: str) -> None:
        self._text += "".join((*self._behind, text))
        self._behind, self._idle = [], None
        while self._text and self._steps[self._state]():
            pass

    def finish(self) -> Pieces:
        """Returns what was held back, at the end of the output."""
        self._read("")
        if self._state is _In.OBJECT and self._scanner.found is Found.END:
            self._end_object(has_ended=True)
        rest, self._text = "".join((*self._held, self._text)), ""
        is_behind_call = self._state is _In.AROUND and self._around.has_call
        is_cut_mark = any(mark.startswith(rest.strip()) for mark in self._closings())
        if not (is_behind_call and is_cut_mark):
            end = next(filter(rest.endswith, self._form.ends), "")
            self._content.add(rest.removesuffix(end))
        self._content.finish()
        return self._take()

    def _take(self) -> Pieces:
        calls, self._calls = self._calls, []
        return Pieces(self._content.take(), calls)

    # Each step moves on in the text and returns whether there may be more to do.

    def _read_text(self) -> bool:
        place = self._places.find(self._text)
        if place is None:
            certain = self._places.num_certain(self._text)
            self._pass(self._text[:certain])
            self._text = self._text[certain:]
            return False
        self._pass(self._text[: place.start])
        self._text = self._text[place.start :]
        self._hold(place.end - place.start)
        self._around = _Calls(place.how)
        self._state = _In.AROUND
        return True

    def _read_around(self) -> bool:
        """White space, separators, marks of lists and fences, the end, or the next object."""
        self._hold(len(self._text) - len(self._text.lstrip()))
        text, around, form = self._text, self._around, self._form
        marks = (form.marker, *self._closings(), *(() if around.fence_is_open else (_JSON_FENCE,)))
        if any(mark != text and mark.startswith(text) for mark in marks):
            return False
        if text.startswith(form.marker):
            self._hold(len(form.marker))
            self._around = _Calls(Begins.MARKER)
        elif around.has_call and self._read_closing():
            pass
        elif text.startswith(_FENCE) and not around.fence_is_open:
            self._hold(len(_JSON_FENCE if text.startswith(_JSON_FENCE) else _FENCE))
            around.fence_is_open = True
        elif text[0] in _SEPARATORS and around.has_call and not around.has_separator:
            self._hold(1)
            around.has_separator = True
        elif text[0] == "[" and not around.list_is_open:
            self._hold(1)
            around.list_is_open = True
        elif text[0] == "{":
            self._begin_object(None)
        elif form.named and not around.list_is_open and _NAME.match(text):
            self._state = _In.NAME
        elif text in form.ends:  # of the output, if nothing follows
            return False
        else:
            self._hold(1)
            self._give_up()
        return True

    def _closings(self) -> tuple[str, ...]:
        """Lists the marks that may stand after a call and are no content."""
        marks = (self._form.closing, *self._form.ends, "]" if self._around.list_is_open else "")
        fence = _FENCE if self._around.fence_is_open else ""
        return tuple(mark for mark in (*marks, fence) if mark)

    def _read_closing(self) -> bool:
        """A mark after a call, which drops what is held before it; False: there is none."""
        for mark in self._closings():
            if self._text.startswith(mark):
                break
        else:
            return False
        self._text = self._text.removeprefix(mark)
        self._held = []
        self._around.has_separator = False
        if mark == "]":
            self._around.list_is_open = False
        elif mark == _FENCE:
            self._around.fence_is_open = False
        else:
            self._state = _In.TEXT
        return True

    def _read_name(self) -> bool:
        """A name, maybe marks, and the brace of the arguments. After a call a mark must be."""
        match = _NAME.match(self._text)
        assert match is not None
        if match.end() > MAX_NAME_CHARS:
            self._hold(MAX_NAME_CHARS)
            self._give_up()
            return True
        rest, has_mark = self._text[match.end() :].lstrip(), False
        for mark, behind in _MARKS_OF_NAMES:
            if mark != rest and mark.startswith(rest):
                return False
            if rest.startswith(mark):
                rest, has_mark = behind.sub("", rest[len(mark) :], count=1), True
        if not rest:
            return False
        if rest[0] == "{" and (has_mark or not self._around.has_call):
            self._hold(len(self._text) - len(rest))
            self._begin_object(match.group())
        else:
            self._hold(match.end())
            self._give_up()
        return True

    def _begin_object(self, name: str | None) -> None:
        self._scanner, self._name = JsonScanner(), name
        self._state = _In.OBJECT

    def _read_object(self) -> bool:
        if self._scanner.read(self._text) is Found.MORE:
            return False
        return self._end_object(has_ended=False)

    def _end_object(self, has_ended: bool) -> bool:
        """The object has ended or is broken, and maybe the output has ended too."""
        place, around, call = self._scanner.place, self._around, self._call()
        if call is not None and around.begin is Begins.SENTENCE and not around.has_call:
            goes_on = self._places.goes_on_as_call(self._text[place:], has_ended)
            if goes_on is None:
                self._idle = self._places.undecided(self._text[place:])
                return False
            call = call if goes_on else None
        if call is None:
            is_broken = self._scanner.found is Found.BROKEN
            # A string that has not been ended may have swallowed the beginning of the next call.
            marker = self._text.find(self._form.marker, 0, place) if is_broken else -1
            self._hold(place if marker < 0 else marker)
            self._give_up()
            return True
        self._text, self._held = self._text[place:], []
        around.has_call, around.has_separator = True, False
        self._content.add_call()
        self._places.pass_call()
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._calls.append(call)
        self._state = _In.AROUND
        return True

    def _call(self) -> FunctionCall | None:
        """The call that the object is. An object alone must have the name of a function."""
        if self._scanner.found is not Found.END:
            return None
        text = self._scanner.mended(self._text)
        if self._name is not None:
            return FunctionCall(self._name, text)
        found = call_object(text)
        if found is None or self._around.begin is Begins.MARKER:
            return found and found.call
        is_known = found.call.name in self._names and not found.is_definition
        return found.call if is_known else None

    def _hold(self, size: int) -> None:
        """Moves on: these characters are content if no call comes of them."""
        self._held.append(self._text[:size])
        self._text = self._text[size:]

    def _give_up(self) -> None:
        """Gives up: the held text is no call."""
        self._pass("".join(self._held))
        self._held = []
        self._state = _In.TEXT

    def _pass(self, text: str) -> None:
        """Goes on after content."""
        self._content.add(text)
        self._places.pass_text(text)
