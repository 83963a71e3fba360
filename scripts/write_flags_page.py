"""Writes docs/flags.md: in which class each argument of SGLang is.

    python scripts/write_flags_page.py

The table is `python/sglang/srt/sglang_flags.py`; a test compares the page with it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.flag_values import flags_of
from sglang.srt.server_args import ServerArgs
from sglang.srt.sglang_arguments import NO_EFFECT, REFUSED, WORKS, all_arguments, written_table
from sglang.srt.sglang_surface import facts

PAGE = Path(__file__).resolve().parents[1] / "docs/flags.md"
WIDTH = 120
INTRO = (
    "Each of the {total} flags of SGLang {version}, and some that it had before, is in one of three"
    " classes, and so is each argument of `Engine` and `ServerArgs`. Where a list has values of a"
    " flag, others are in another class. SGLang's defaults, null, false and empty values ask for"
    " nothing: they are always accepted, and nothing is said.",
    "`python -m sglang.launch_server --help` has this runtime's flags with what they do; `--config"
    " FILE` reads them from a YAML file.",
    "<!-- Written by scripts/write_flags_page.py from python/sglang/srt/sglang_flags.py. -->",
)
SECTIONS = {
    WORKS: "## Works",
    NO_EFFECT: "## No effect here\n\n"
    "Accepted; one line at the start says so and what happens instead:",
    REFUSED: "## Refused\n\nThe server does not start, and `Engine` raises a `ValueError`; one line"
    " says what to do instead:",
}


def page() -> str:
    """Writes the page's text."""
    own, known = flags_of(ServerArgs), facts()["flags"]
    intro = (text.format(version=facts()["version"], total=len(known)) for text in INTRO)
    parts = ["# SGLang's flags", *(textwrap.fill(text, WIDTH) for text in intro)]
    for kind, entries in written_table(own).items():
        parts.append(SECTIONS[kind])
        if kind == WORKS:
            parts.append(_listed([all_arguments()[name].flags[0] for name in known if name in own]))
            parts.append("What is always so, with the flag or without:")
        parts.append("\n".join(_listed(flags, f"- {says}: ") for says, flags in entries))
    return "\n\n".join(parts) + "\n"


def _listed(flags: Sequence[str], start: str = "") -> str:
    return textwrap.fill(
        start + ", ".join(f"`{flag}`" for flag in flags),
        WIDTH,
        subsequent_indent="  " if start else "",
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name} is written.")
