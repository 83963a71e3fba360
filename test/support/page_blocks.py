"""The code blocks of README.md and docs/*.md, and the commands of those in bash."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from code_shape import ROOT

PAGES = (ROOT / "README.md", ROOT / "sgl-kernel/README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        place: the page and the line of its first fence.
        reason: why it cannot be run everywhere, as the page's comment before it says; None: it can.
    """

    place: str
    language: str
    text: str
    reason: str | None

    def commands(self) -> list[list[str]]:
        """Gives the words of each command of a bash block, without its comments.

        Raises:
            ValueError: for a quotation without an end.
        """
        found: list[list[str]] = []
        text = ""
        for line in self.text.splitlines(keepends=True):
            text += line
            if text.endswith("\\\n"):
                text = text[:-2]
                continue
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # a quotation that goes on in the next line
                continue
            text = ""
            while "&&" in words:
                end = words.index("&&")
                found.append(words[:end])
                words = words[end + 1 :]
            found.append(words)
        if text:
            raise ValueError(f"{self.place}: a quotation has no end.")
        return [words for words in found if words]


def blocks_of(page: Path) -> list[Block]:
    """Gives a page's code blocks in their order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(
            f"{name}:{text.count(chr(10), 0, match.start('language')) + 1}",
            match["language"],
            match["text"],
            match["reason"],
        )
        for match in FENCED.finditer(text)
    ]
