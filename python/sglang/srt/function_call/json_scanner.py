"""Finds where a JSON object ends in a text that comes bit by bit, and at once if it is none.

Two slips of models are mended: control characters in strings, and a comma after the last value.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

MAX_DEPTH = 64

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class Found(Enum):
    """The state of knowledge about an object."""

    MORE = "it goes on"
    END = "it has ended"
    BROKEN = "it is no JSON"


class _At(Enum):
    VALUE = "a value"
    VALUE_OR_END = "a value, or the end of a list"
    KEY_OR_END = "a key, or the end of an object"
    NEXT_VALUE_OR_END = "a value behind a comma, or the end of a list"
    NEXT_KEY_OR_END = "a key behind a comma, or the end of an object"
    COLON = "a colon"
    COMMA_OR_END = "a comma, or the end"
    STRING = "in a string"
    SCALAR = "in a number or a name"


_VALUES = (_At.VALUE, _At.VALUE_OR_END, _At.NEXT_VALUE_OR_END)
_KEYS = (_At.KEY_OR_END, _At.NEXT_KEY_OR_END)
_BEHIND_COMMA = (_At.NEXT_VALUE_OR_END, _At.NEXT_KEY_OR_END)
_MAY_END = (_At.COMMA_OR_END, _At.VALUE_OR_END, _At.KEY_OR_END, *_BEHIND_COMMA)


class _Slip(NamedTuple):
    """A character of a text, and what JSON has in its place."""

    place: int
    right: str


class JsonScanner:
    """Reads one JSON object, beginning with its brace. Each character is looked at once.

    Attributes:
        place: where in the text it has ended, or is broken; before, how far it is read.
        found: what is known of it.
    """

    def __init__(self) -> None:
        self.place = 0
        self.found = Found.MORE
        self._at = _At.VALUE
        self._open: list[str] = []
        self._scalar_start = 0
        self._is_key = False
        self._comma = 0  # the place of the last one
        self._slips: list[_Slip] = []

    def mended(self, text: str) -> str:
        """The object as JSON has it, once it has ended."""
        pieces, start = [], 0
        for place, right in self._slips:
            pieces += [text[start:place], right]
            start = place + 1
        return "".join((*pieces, text[start : self.place]))

    def read(self, text: str) -> Found:
        """Reads on in a text that begins with all that was there before."""
        if self.found is Found.MORE:
            self.found = self._read(text)
        return self.found

    def _read(self, text: str) -> Found:
        while self.place < len(text):
            if self._at is _At.STRING:
                step = self._read_string(text)
            elif self._at is _At.SCALAR:
                step = self._read_scalar(text)
            else:
                self.place = _end_of(_SPACE, text, self.place)
                if self.place == len(text):
                    return Found.MORE
                step = self._read_mark(text[self.place])
            if step is not None:
                return step
        return Found.MORE

    def _read_mark(self, char: str) -> Found | None:
        """One character between strings, numbers and names."""
        at, takes_value = self._at, self._at in _VALUES
        if char == '"' and (takes_value or at in _KEYS):
            self._is_key = not takes_value
            self._at = _At.STRING
        elif char == "{" and takes_value and len(self._open) < MAX_DEPTH:
            self._open.append("}")
            self._at = _At.KEY_OR_END
        elif not self._open:
            return Found.BROKEN
        elif char == "[" and takes_value and len(self._open) < MAX_DEPTH:
            self._open.append("]")
            self._at = _At.VALUE_OR_END
        elif char == self._open[-1] and at in _MAY_END:
            if at in _BEHIND_COMMA:
                self._slips.append(_Slip(self._comma, ""))
            self._open.pop()
            self._at = _At.COMMA_OR_END
        elif char == ":" and at is _At.COLON:
            self._at = _At.VALUE
        elif char == "," and at is _At.COMMA_OR_END:
            self._comma = self.place
            self._at = _At.NEXT_KEY_OR_END if self._open[-1] == "}" else _At.NEXT_VALUE_OR_END
        elif takes_value and (char.isascii() and (char.isalnum() or char == "-")):
            self._scalar_start = self.place
            self._at = _At.SCALAR
        else:
            return Found.BROKEN
        self.place += 1
        return None if self._open else Found.END

    def _read_string(self, text: str) -> Found | None:
        self.place = _end_of(_PLAIN, text, self.place)
        if self.place == len(text):
            return Found.MORE
        char = text[self.place]
        if char == '"':
            self.place += 1
            self._at = _At.COLON if self._is_key else _At.COMMA_OR_END
            return None
        if char != "\\":
            self._slips.append(_Slip(self.place, f"\\u{ord(char):04x}"))
            self.place += 1
            return None
        if self.place + 1 == len(text):
            return Found.MORE
        size = 6 if text[self.place + 1] == "u" else 2
        escape = text[self.place : self.place + size]
        if size == 2 and escape[1] not in _ESCAPES:
            return Found.BROKEN
        if not _HEX.issuperset(escape[2:]):
            return Found.BROKEN
        if len(escape) < size:
            return Found.MORE
        self.place += size
        return None

    def _read_scalar(self, text: str) -> Found | None:
        self.place = _end_of(_SCALAR_CHARS, text, self.place)
        if self.place == len(text):
            return Found.MORE
        if _SCALAR.fullmatch(text, self._scalar_start, self.place) is None:
            return Found.BROKEN
        self._at = _At.COMMA_OR_END
        return None


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Returns where a match ends, of a pattern that always matches."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
