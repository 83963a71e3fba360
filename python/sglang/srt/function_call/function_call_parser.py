"""Finds calls of functions in an output that comes bit by bit.

A call is given out when its object is complete and right. Until then its text is held back: what
turns out to be no call, such as broken JSON, is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple

import msgspec

from sglang.srt.function_call.formats import ARGUMENTS_MARK, CallFormat
from sglang.srt.function_call.json_scanner import Found, JsonScanner
from sglang.srt.parser.held_text import num_held

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class FunctionCall(NamedTuple):
    """A call; the arguments are a JSON object as text, as the model wrote them."""

    name: str
    arguments: str


class _Object(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class Pieces(NamedTuple):
    """What is new of an output, in its order but for the calls, which come after the content."""

    content: str
    calls: list[FunctionCall]


class _In(Enum):
    TEXT = "text"
    BEFORE = "before an object, behind a marker"
    NAME = "a name before an object"
    OBJECT = "an object"
    AFTER = "behind an object"


class FunctionCallParser:
    """Divides one output into content and calls.

    The pieces that `push` and `finish` return, appended, do not depend on how the text is cut.
    White space around calls is in neither.

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
        self._held = ""  # looked at, and content if no call comes of it
        self._state = _In.TEXT
        self._scanner = JsonScanner()
        self._name: str | None = None  # before the object
        self._has_list = False
        self._is_bare = False
        self._at_start = form.is_bare
        self._skips_space = False  # white space here is behind a call
        self._content: list[str] = []
        self._calls: list[FunctionCall] = []
        self._steps: dict[_In, Callable[[], bool]] = {
            _In.TEXT: self._read_text,
            _In.BEFORE: self._read_before,
            _In.NAME: self._read_name,
            _In.OBJECT: self._read_object,
            _In.AFTER: self._read_after,
        }

    def push(self, text: str) -> Pieces:
        """Adds text and returns what is certain now."""
        self._text += text
        while self._text and self._steps[self._state]():
            pass
        return self._take()

    def finish(self) -> Pieces:
        """What was held back, at the end of the output."""
        rest, self._text = self._held + self._text, ""
        if self._state is _In.AFTER or self._skips_space:
            rest = rest.lstrip()
        is_cut_closing = self._state is _In.AFTER and self._form.closing.startswith(rest)
        self._content.append("" if is_cut_closing else rest)
        return self._take()

    def _take(self) -> Pieces:
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return Pieces(content, calls)

    # Each step moves on in the text and returns whether there may be more to do.

    def _read_text(self) -> bool:
        if self._skips_space or self._at_start:
            stripped = self._text.lstrip()
            if not stripped:
                return False
            if self._skips_space:
                self._text, self._skips_space = stripped, False
        if self._at_start:
            self._at_start = False
            if self._text.lstrip().startswith("{"):
                self._is_bare = True
                self._begin_calls("")
                return True
        before, marker, after = self._text.partition(self._form.marker)
        if marker:
            self._content.append(before.rstrip())
            self._text = after
            self._held = before[len(before.rstrip()) :]
            self._begin_calls(marker)
            return True
        end = len(self._text) - num_held(self._text, self._form.marker)
        certain = self._text[:end].rstrip()
        self._content.append(certain)
        self._text = self._text[len(certain) :]
        return False

    def _begin_calls(self, marker: str) -> None:
        self._held += marker
        self._has_list = False
        self._state = _In.BEFORE

    def _read_before(self) -> bool:
        """White space, the bracket of a list, a name, or the object."""
        stripped = self._text.lstrip()
        self._hold(len(self._text) - len(stripped))
        if not stripped:
            return False
        if stripped[0] == "{":
            self._scanner, self._name = JsonScanner(), None
            self._state = _In.OBJECT
        elif stripped[0] == "[" and self._form.in_list and not self._has_list:
            self._has_list = True
            self._hold(1)
        elif self._form.named and not self._has_list and _NAME.match(stripped):
            self._state = _In.NAME
        else:
            self._give_up()
        return True

    def _read_name(self) -> bool:
        """A name, maybe a mark, and the brace of the arguments."""
        match = _NAME.match(self._text)
        assert match is not None
        rest = self._text[match.end() :]
        if match.end() > MAX_NAME_CHARS:
            self._hold(MAX_NAME_CHARS)
            self._give_up()
            return True
        if not rest or (ARGUMENTS_MARK.startswith(rest) and rest != ARGUMENTS_MARK):
            return False
        after = rest.removeprefix(ARGUMENTS_MARK).lstrip()
        if not after:
            return False
        self._name = match.group()
        self._hold(len(self._text) - len(after))
        if after[0] == "{":
            self._scanner = JsonScanner()
            self._state = _In.OBJECT
        else:
            self._give_up()
        return True

    def _read_object(self) -> bool:
        found = self._scanner.read(self._text)
        if found is Found.MORE:
            return False
        call = self._call_of(self._text[: self._scanner.place]) if found is Found.END else None
        if call is None:
            self._hold(self._scanner.place)
            self._give_up()
            return True
        self._text = self._text[self._scanner.place :]
        self._held = ""
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._calls.append(call)
        self._state = _In.AFTER
        return True

    def _call_of(self, text: str) -> FunctionCall | None:
        if self._name is not None:
            return FunctionCall(self._name, text)
        try:
            found = msgspec.json.decode(text, type=_Object)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        raw = bytes(found.arguments) or bytes(found.parameters) or b"{}"
        arguments = raw.decode().strip()
        is_known = found.name in self._names or not self._is_bare
        if not (found.name and is_known and arguments.startswith("{")):
            return None
        return FunctionCall(found.name, arguments)

    def _read_after(self) -> bool:
        """What may follow a call: the end of a list or of a marker, or a separator."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        separator = "," if self._has_list else self._form.separator
        if separator and self._text[0] == separator:
            self._hold(1)
            self._state = _In.BEFORE
            return True
        closing = "]" if self._has_list else self._form.closing
        if closing and closing != self._text and closing.startswith(self._text):
            return False
        if closing:
            self._text = self._text.removeprefix(closing)
        self._end_calls()
        self._skips_space = True
        return True

    def _hold(self, size: int) -> None:
        """Moves on: these characters are content if no call comes of them."""
        self._held += self._text[:size]
        self._text = self._text[size:]

    def _give_up(self) -> None:
        """What is held is no call."""
        self._content.append(self._held)
        self._held = ""
        self._end_calls()

    def _end_calls(self) -> None:
        self._is_bare = False
        self._state = _In.TEXT
