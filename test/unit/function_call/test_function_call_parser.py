"""Calls of functions are found in outputs, wherever these are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.formats import CALL_FORMATS, CallFormat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_scanner import Found, JsonScanner

NAMES = frozenset(("weather", "now"))
FORMATS = ["qwen25", "llama3", "mistral"]
Parsed = tuple[str, list[tuple[str, Any]]]


def parse(form: CallFormat, pieces: list[str], max_calls: int | None = None) -> Parsed:
    parser = FunctionCallParser(form, NAMES, max_calls)
    found = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls = [call for piece in found for call in piece.calls]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    return "".join(piece.content for piece in found), [(c.name, c.arguments) for c in calls]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5) | st.just("</tool_call>"), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def written(name: str, calls: list[tuple[str, Any]], indent: int | None) -> str:
    """Calls as a model writes them."""
    form = CALL_FORMATS[name]
    objects = [
        json.dumps({"name": n, form.arguments: a}, indent=indent, ensure_ascii=bool(indent))
        for n, a in calls
    ]
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if name == "llama3":
        return "; ".join(objects)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS, indent=st.sampled_from([None, 2]), cuts=st.lists(st.integers(0, 400)))
@settings(max_examples=60, deadline=None)
def test_calls_are_those_that_were_written(
    name: str, calls: list[tuple[str, Any]], indent: int | None, cuts: list[int]
) -> None:
    text = written(name, calls, indent)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for pieces in ([text], list(text), [text[a:b] for a, b in itertools.pairwise(places)]):
        content, found = parse(CALL_FORMATS[name], pieces)
        assert content == ""
        assert [(n, json.loads(a)) for n, a in found] == calls


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|eom_id|>",
    "[CALL_ID]",
    "```",
    "`",
    "json",
    "Hm. ",
    "<tool",
    "[",
    "]",
]
MARKS += ['{"name": "now", "arguments": {}}', '{"name": "weather", "parameters": {"a": "</tool_"}}']
MARKS += [
    '{"name": "other"}',
    "{}",
    "{",
    "}",
    '"',
    ",",
    ";",
    " ",
    "\n",
    "now",
    "text",
    "1",
    "\\",
    ":",
]


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=10), size=st.integers(1, 7))
@settings(max_examples=250, deadline=None)
def test_cuts_change_nothing(name: str, parts: list[str], size: int) -> None:
    text = "".join(parts)
    form = CALL_FORMATS[name]
    whole = parse(form, [text])
    assert parse(form, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    assert parse(form, list(text)) == whole


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=10))
@settings(max_examples=100, deadline=None)
def test_a_text_without_calls_is_content_as_a_whole(name: str, parts: list[str]) -> None:
    """But for a mark at its very end that ends outputs."""
    text, form = "".join(parts), CALL_FORMATS[name]
    content, calls = parse(form, [text])
    if not calls:
        assert content == text.removesuffix(next(filter(text.endswith, form.ends), ""))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "qwen25",
            'Hm.\n<tool_call>{"name": "now"}</tool_call>\nBye',
            ("Hm.\nBye", [("now", "{}")]),
        ),
        (
            "qwen25",
            '<tool_call>{"name": "now", "arguments": {"a": 1}}',
            ("", [("now", '{"a": 1}')]),
        ),
        ("qwen25", '<tool_call>{"name": now}</tool_call>', None),
        ("qwen25", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
        ("qwen25", '<tool_call>{"name": "now"', None),
        ("qwen25", '{"name": "now", "arguments": {}}', None),
        ("llama3", '{"name": "now", "parameters": {}}', ("", [("now", "{}")])),
        ("llama3", '<|python_tag|>{"name": "x", "parameters": {}}', ("", [("x", "{}")])),
        ("llama3", '{"name": "unknown", "parameters": {}}', None),
        ("llama3", 'Say {"name": "now", "parameters": {}}', None),
        ("llama3", '<|python_tag|>print("now")', None),
        ("mistral", 'Ok[TOOL_CALLS]now[ARGS]{"a": 1}', ("Ok", [("now", '{"a": 1}')])),
        (
            "mistral",
            '[TOOL_CALLS]now {"a": 1}[TOOL_CALLS]now{}',
            ("", [("now", '{"a": 1}'), ("now", "{}")]),
        ),
        ("mistral", "[TOOL_CALLS] I will not", None),
    ],
)
def test_forms_of_models(name: str, text: str, expected: Parsed | None) -> None:
    assert parse(CALL_FORMATS[name], [text]) == (expected or (text, []))


def test_calls_beyond_the_last_that_is_wanted_are_dropped() -> None:
    text = written("qwen25", [("now", {}), ("weather", {})], None)
    assert parse(CALL_FORMATS["qwen25"], [text], 1) == ("", [("now", "{}")])


@given(value=ARGUMENTS, tail=st.text(max_size=5), indent=st.sampled_from([None, 1]))
@settings(max_examples=100, deadline=None)
def test_the_scanner_finds_the_end_of_what_json_writes(
    value: Any, tail: str, indent: int | None
) -> None:
    text = json.dumps(value, indent=indent)
    scanner = JsonScanner()
    assert scanner.read(text + tail) is Found.END
    assert scanner.place == len(text)


def careless(value: Any) -> str:
    """JSON with a comma behind each value and with line breaks and tabs in strings as they are."""
    if isinstance(value, dict):
        return "{" + "".join(f"{careless(k)}: {careless(v)}, " for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"{careless(item)},\n" for item in value) + "]"
    return json.dumps(value).replace(r"\n", "\n").replace(r"\t", "\t")


TEXTS = st.text(alphabet='a"é\n\t{}[],:', max_size=6)


@given(
    value=st.dictionaries(
        TEXTS,
        st.recursive(
            TEXTS | st.integers() | st.none(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_scanner_mends_commas_and_control_characters(value: dict[str, Any]) -> None:
    text, scanner = careless(value), JsonScanner()
    assert scanner.read(f"{text}, ") is Found.END
    assert scanner.place == len(text)
    assert json.loads(scanner.mended(text)) == value


@given(text=st.lists(st.sampled_from([*'{}[]",:\\u0a1-.e \n', "true", '"a":', "nul"])).map("".join))
@settings(max_examples=300, deadline=None)
def test_the_scanner_takes_what_json_takes(text: str) -> None:
    text = "{" + text
    scanner = JsonScanner()
    if scanner.read(text) is Found.END:
        json.loads(scanner.mended(text))
    else:
        with pytest.raises(ValueError):
            json.loads(text)


@pytest.mark.parametrize(
    ("name", "before", "blank"),
    [
        ("qwen25", "<tool_call>", " "),
        ("qwen25", '<tool_call>{"name": "now"}</tool_call>', "\n"),
        ("qwen25", '<tool_call>{"name": "now"', " "),
        ("mistral", "[TOOL_CALLS]now", " "),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]", "\t"),
        ("llama3", 'Hi. {"name": "now", "parameters": {}}', " "),
        ("llama3", 'Hi. {"name": "now", "parameters": {}}', "]"),
        ("llama3", 'Hi. {"name": "now", "parameters": {}},', "\n"),
    ],
)
def test_blanks_are_not_looked_at_again_with_each_more(
    monkeypatch: pytest.MonkeyPatch, name: str, before: str, blank: str
) -> None:
    num_blanks, num_chars = 500, 0
    read = FunctionCallParser._read

    def counted(parser: FunctionCallParser, text: str) -> None:
        nonlocal num_chars
        num_chars += len(parser._text) + len(text)
        read(parser, text)

    monkeypatch.setattr(FunctionCallParser, "_read", counted)
    parse(CALL_FORMATS[name], [before, *[blank] * num_blanks, "x"])
    assert num_chars < 3 * (len(before) + num_blanks)
