"""The content around calls: without the calls its words do not run together."""

from __future__ import annotations


class SpacedContent:
    """Puts together the text before, between and after calls.

    Between the texts around calls stays the white space before the calls, but for indentation.
    Where there is none, that after them stays, and else one space. Before the first text and
    after the last, white space around calls is dropped.
    """

    def __init__(self) -> None:
        self._certain: list[str] = []
        self._space: list[str] = []  # after the text so far
        self._space_behind: list[str] = []  # after the calls that follow it
        self._has_text = False
        self._is_behind_call = False

    def add(self, text: str) -> None:
        """Adds text of the output."""
        words = text.lstrip()
        if not words:
            (self._space_behind if self._is_behind_call else self._space).append(text)
            return
        space = "".join(self._space)
        if self._is_behind_call:
            behind = "".join((*self._space_behind, text[: len(text) - len(words)]))
            space = (space.rstrip(" \t") or space or behind or " ") * self._has_text
            text = words
            self._space_behind = []
            self._is_behind_call = False
        words = text.rstrip()
        self._certain.append(space + words)
        self._space = [text[len(words) :]]
        self._has_text = True

    def add_call(self) -> None:
        """A call stands here."""
        if not any(self._space):
            self._space = self._space_behind
        self._space_behind = []
        self._is_behind_call = True

    def finish(self) -> None:
        """The output has ended: what was held back is certain."""
        if not self._is_behind_call:
            self._certain += self._space
        self._space, self._space_behind = [], []

    def take(self) -> str:
        """Returns what is certain and has not been taken."""
        certain, self._certain = "".join(self._certain), []
        return certain
