"""The content around calls: without the calls its words do not run together."""

from __future__ import annotations


class SpacedContent:
    """Puts together the text before, between and behind calls.

    Between the texts around calls stays the white space before the calls, but for indentation.
    Where there is none, that behind them stays, and else one space. Before the first text and
    behind the last, white space around calls is dropped.
    """

    def __init__(self) -> None:
        self._certain: list[str] = []
        self._space = ""  # behind the text so far
        self._space_behind = ""  # behind the calls that follow it
        self._has_text = False
        self._is_behind_call = False

    def add(self, text: str) -> None:
        """Adds text of the output."""
        if self._is_behind_call:
            words = text.lstrip()
            self._space_behind += text[: len(text) - len(words)]
            if not words:
                return
            before = self._space.rstrip(" \t") or self._space
            text = (before or self._space_behind or " ") * self._has_text + words
            self._space = self._space_behind = ""
            self._is_behind_call = False
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        self._has_text = self._has_text or bool(words)
        self._certain.append(words)

    def add_call(self) -> None:
        """A call stands here."""
        self._space = self._space or self._space_behind
        self._space_behind = ""
        self._is_behind_call = True

    def finish(self) -> None:
        """The output has ended: what was held back is certain."""
        if not self._is_behind_call:
            self._certain.append(self._space)
        self._space = self._space_behind = ""

    def take(self) -> str:
        """Returns what is certain and has not been taken."""
        certain, self._certain = "".join(self._certain), []
        return certain
