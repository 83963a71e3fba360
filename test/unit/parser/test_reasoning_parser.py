"""Reasoning is told from content, wherever the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.parser.reasoning_parser import (
    REASONING_FORMATS,
    Outset,
    Parts,
    ReasoningFormat,
    ReasoningParser,
)

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think>", "</", "a", " ", "\n", "é", "<th"]),
    max_size=12,
).map("".join)


def parse(pieces: list[str], is_open: bool) -> Parts:
    outset = Outset.OPEN if is_open else Outset.FREE
    return parse_from(outset, pieces)


def parse_from(outset: Outset, pieces: list[str], gap: str | None = None) -> Parts:
    parser = ReasoningParser(ReasoningFormat(), outset, gap)
    found = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return Parts("".join(p.reasoning for p in found), "".join(p.content for p in found))


@given(text=PIECES, cuts=st.lists(st.integers(0, 80)), is_open=st.booleans())
@settings(max_examples=300, deadline=None)
def test_cuts_change_nothing(text: str, cuts: list[int], is_open: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse([text], is_open)
    assert parse(pieces, is_open) == whole
    assert parse(list(text), is_open) == whole


@given(text=PIECES, is_open=st.booleans())
@settings(max_examples=200, deadline=None)
def test_parts_are_the_text_without_its_marks(text: str, is_open: bool) -> None:
    """Oracle: the first end mark divides, if there is reasoning at all."""
    bare = text.lstrip()
    starts = bare.startswith("<think>")
    if starts or is_open:
        before, _, after = bare.removeprefix("<think>").partition("</think>")
        assert parse([text], is_open) == (before.strip(), after.lstrip())
    else:
        assert parse([text], is_open) == ("", text)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", "assistant\n", "<think>\nhm\n</think>\n\nHi", ("hm", "Hi")),
        ("qwen3", "assistant\n", "Hi <think>", ("", "Hi <think>")),
        ("qwen3", "<think>\n", "hm</think>Hi", ("hm", "Hi")),
        ("qwen3", "<think>\n\n</think>\n\n", "Hi", ("", "Hi")),
        ("qwen3-thinking", "", "hm</think>Hi", ("hm", "Hi")),
        ("qwen3-thinking", "<think>\n\n</think>\n\n", "Hi", ("", "Hi")),
        ("deepseek-r1", "a</think>b<think>\n", "hm</think>Hi", ("hm", "Hi")),
        ("deepseek-r1", "<think>\nhm</think>\n", "Hi", ("", "Hi")),
        ("qwen3", "<think>\nI s", " ee</think>Hi", (" ee", "Hi")),
        ("qwen3", "<think>\nI s", "<think> ee", ("<think> ee", "")),
        ("deepseek-r1", "", "hm\n</think>\nHi", ("hm", "Hi")),
        ("deepseek-r1", "", "<think>cut off", ("cut off", "")),
    ],
)
def test_formats(name: str, prompt: str, text: str, expected: tuple[str, str]) -> None:
    form = REASONING_FORMATS[name]
    for pieces in ([text], list(text)):
        assert parse_from(form.outset_after(prompt), pieces) == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a</think>\n\n  x\n", "  x\n"),
        ("a</think>\n\n\n", "\n"),
        ("a</think>\n", ""),
        ("a</think> b", " b"),
    ],
)
def test_of_white_space_behind_reasoning_only_a_known_gap_is_left_out(
    text: str, content: str
) -> None:
    """Checks that what a grammar holds is content as it is."""
    for pieces in ([text], list(text)):
        assert parse_from(Outset.OPEN, pieces, "\n\n") == ("a", content)


@pytest.mark.parametrize(("before", "is_open"), [("", False), ("", True), ("<think>hm", False)])
def test_blanks_are_not_looked_at_again_with_each_more(
    monkeypatch: pytest.MonkeyPatch, before: str, is_open: bool
) -> None:
    num_blanks, num_chars = 500, 0

    def counted(name: str) -> None:
        look = getattr(ReasoningParser, name)

        def wrapper(parser: ReasoningParser) -> object:
            nonlocal num_chars
            num_chars += len(parser._text)
            return look(parser)

        monkeypatch.setattr(ReasoningParser, name, wrapper)

    counted("_begin")
    counted("_take_reasoning")
    parse_from(Outset.OPEN if is_open else Outset.FREE, [before, *[" "] * num_blanks, "x"])
    assert 0 < num_chars < 3 * num_blanks
