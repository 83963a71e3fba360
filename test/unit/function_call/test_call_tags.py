"""Calls that a grammar holds: what it lets through is what the parser finds, and has the schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from grammar_cases import matches_schema
from marked_texts import COMPILER, random_text, takes
from sglang.srt.constrained.matchers import GrammarError
from sglang.srt.function_call.call_tags import (
    HeldFunction,
    calls_in_text,
    calls_or_content,
    forced_calls,
    source_of_error,
)
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.sampling.grammar import STRUCTURAL_TAG, Grammar

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["é", "}]; ", "}</tool_call>", '"'], "type": "string"},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
EITHER = {
    "type": "object",
    "anyOf": [
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
    ],
}
FUNCTIONS = [
    HeldFunction("weather", CITY, "tools[0]"),
    HeldFunction("weather.now", EITHER, "tools[1]"),
    HeldFunction("none", {"type": "object", "additionalProperties": False}, "tools[2]"),
]
SCHEMAS = {each.name: each.schema for each in FUNCTIONS}
FORMS = ("qwen25", "llama3", "mistral")
WITH_MARK = ("qwen25", "mistral")


def grammar_of(tag: dict[str, Any]) -> Grammar:
    return Grammar(STRUCTURAL_TAG, json.dumps(tag))


def parsed(form: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = FunctionCallParser(CALL_FORMATS[form], SCHEMAS)
    pieces = (parser.push(text), parser.finish())
    return "".join(p.content for p in pieces), [tuple(c) for p in pieces for c in p.calls]


def is_valid(name: str, arguments: str) -> bool:
    return name in SCHEMAS and matches_schema(SCHEMAS[name])(arguments)


@pytest.mark.long_matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_single", [False, True])
def test_what_is_forced_is_calls_of_the_functions_and_nothing_else(
    form: str, is_single: bool
) -> None:
    grammar = grammar_of(forced_calls(CALL_FORMATS[form], FUNCTIONS[:2], is_single))
    texts = [text for seed in range(40) if (text := random_text(grammar, seed))]
    assert len(texts) > 20
    counts, names = set(), set()
    for text in texts:
        content, calls = parsed(form, text)
        assert content == ""
        assert calls
        assert all(is_valid(*call) for call in calls)
        counts.add(len(calls))
        names |= {name for name, _ in calls}
    assert names == {"weather", "weather.now"}
    assert counts == {1} if is_single else len(counts) > 1


def calls_as_text(form: str, calls: list[tuple[str, str]]) -> str:
    """As the models' templates write them."""
    key = "parameters" if form == "llama3" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if form == "qwen25":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    return "; ".join(objects) if form == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


ARGUMENTS = [
    '{"city": "é"}',
    '{"city": "}]; ", "days": 3}',
    '{"city": "Paris"}',
    '{"city": "é", "days": 10}',
    '{"days": 3}',
    "{}",
    '{"a": 1}',
    '{"b": null}',
    '{"a": 2}',
    '"é"',
    "3",
]
NAMES = ["weather", "weather.now", "none", "other"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_single", [False, True])
def test_a_call_is_taken_if_its_arguments_have_the_schema(form: str, is_single: bool) -> None:
    grammar = grammar_of(forced_calls(CALL_FORMATS[form], FUNCTIONS, is_single))
    every, num_taken = list(itertools.product(NAMES, ARGUMENTS)), 0
    for call in every:
        text = calls_as_text(form, [call])
        assert takes(grammar, text) == is_valid(*call), text
        assert not takes(grammar, f"{text} so")
        assert not takes(grammar, f"I ask. {text}")
        num_taken += is_valid(*call)
    assert 4 < num_taken < len(every)
    good = [call for call in every if is_valid(*call)]
    for first, second in itertools.product(good[:3], every[::5]):
        text = calls_as_text(form, [first, second])
        assert takes(grammar, text) == (is_valid(*second) and not is_single), text
    assert not takes(grammar, "")
    assert not takes(grammar, "Hello")


@pytest.mark.parametrize("form", WITH_MARK)
def test_calls_in_text_have_their_schema_and_text_is_free(form: str) -> None:
    grammar = grammar_of(calls_in_text(CALL_FORMATS[form], FUNCTIONS))
    for text in ("", "Hello", '{"name": "weather"}', "<think>so</think>", "a [b"):
        assert takes(grammar, text)
    for call in itertools.product(NAMES, ARGUMENTS):
        text = calls_as_text(form, [call])
        for before in ("", "<think>\nI ask.\n"):
            assert takes(grammar, before + text) == is_valid(*call), text
            assert takes(grammar, f"{before}{text}\n{text} bye") == is_valid(*call)


def test_a_name_may_stand_before_its_object() -> None:
    grammar = grammar_of(calls_in_text(CALL_FORMATS["mistral"], FUNCTIONS))
    for name, arguments in itertools.product(NAMES, ARGUMENTS):
        for mark in ("", "[ARGS]"):
            text = f"[TOOL_CALLS]{name}{mark}{arguments}"
            assert takes(grammar, text) == is_valid(name, arguments), text


@pytest.mark.parametrize("form", FORMS)
def test_a_schema_that_cannot_be_kept_is_named_by_its_function(form: str) -> None:
    bad = HeldFunction("bad", {"type": "object", "not": {}}, "tools[3].function.parameters")
    functions = [*FUNCTIONS, bad]
    tags = [forced_calls(CALL_FORMATS[form], functions, False)]
    if form in WITH_MARK:
        tags.append(calls_in_text(CALL_FORMATS[form], functions))
    for tag in tags:
        with pytest.raises(GrammarError) as caught:
            COMPILER.check(grammar_of(tag))
        message = f"sampling_params.structural_tag: {caught.value}."
        parts = [(each.place, each.schema) for each in functions]
        found = source_of_error(message, tag, parts)
        assert found is not None
        assert found[0] == bad.place
        assert found[1].startswith("failed to compile")
        assert "not" in found[1]
        assert source_of_error("sampling_params.structural_tag: has 9 bytes.", tag, parts) is None


CONTENT = {
    "type": "object",
    "properties": {"nam": {"const": 1}, "name": {"type": "string", "maxLength": 9}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_single", [False, True])
def test_an_answer_is_calls_or_content_of_its_form_and_never_both(
    form: str, is_single: bool
) -> None:
    content = {"type": "json_schema", "json_schema": CONTENT}
    tag = calls_or_content(CALL_FORMATS[form], FUNCTIONS, is_single, content)
    grammar = grammar_of(tag)
    for text in ('{"name": "weather"}', '{"name": "wea"}', '{"nam":1, "name": ""}', '{"name":"x"}'):
        assert takes(grammar, text)
        assert not takes(grammar, text + text)
    for text in ("", "Hello", '{"nam": 2, "name": "x"}', "{}", "<think>"):
        assert not takes(grammar, text)
    every = list(itertools.product(NAMES, ARGUMENTS))
    for call in every:
        text = calls_as_text(form, [call])
        assert takes(grammar, text) == is_valid(*call), text
        assert not takes(grammar, text + ' {"name": "x"}')
    good = [call for call in every if is_valid(*call)]
    for first, second in itertools.product(good[:2], every[::7]):
        text = calls_as_text(form, [first, second])
        assert takes(grammar, text) == (is_valid(*second) and not is_single), text
