"""A terminal gets colours, and nothing else does."""

from __future__ import annotations

import io
import logging
import re

import pytest

from sglang.srt.observability.log_format import FIGURES, make_handler
from sglang.srt.observability.start_log import start_phase

LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d scheduler\] WARNING 8 running, 12.5 tokens/s\.\n"
)
COLOUR = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, extra: dict[str, bool] | None = None, **environ: str) -> str:
    handler = make_handler(stream, "scheduler", environ)
    logger = logging.Logger("a-logger-of-its-own")
    logger.addHandler(handler)
    logger.warning("%s running, %.1f tokens/s.", 8, 12.5, extra=extra)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "environ"),
    [(io.StringIO, {}), (Terminal, {"NO_COLOR": "1"}), (Terminal, {"TERM": "dumb"})],
)
def test_a_file_and_those_who_want_none_get_no_colours(
    stream: type[io.StringIO], environ: dict[str, str]
) -> None:
    assert LINE.fullmatch(written(stream(), FIGURES, **environ))


def test_a_terminal_gets_the_same_text_with_the_level_in_its_colour() -> None:
    text = written(Terminal())
    assert LINE.fullmatch(COLOUR.sub(r"\2", text))
    assert [found[1] for found in COLOUR.findall(text)][1:] == ["WARNING"]


def test_the_numbers_of_a_line_of_figures_stand_out() -> None:
    text = written(Terminal(), FIGURES, NO_COLOR="")
    assert LINE.fullmatch(COLOUR.sub(r"\2", text))
    assert [found[1] for found in COLOUR.findall(text)][1:] == ["WARNING", "8", "12.5"]


def test_a_phase_of_a_start_says_when_it_begins_and_what_it_took_if_that_was_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([10.0, 10.9, 20.0, 23.25])
    monkeypatch.setattr("sglang.srt.observability.start_log.time.monotonic", lambda: next(times))
    with caplog.at_level("INFO"):
        for _ in range(2):
            with start_phase("Loading the weights"):
                pass
    assert caplog.messages == ["Loading the weights."] * 2 + ["Loading the weights took 3.2 s."]
