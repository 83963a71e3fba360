"""Errors of grammars that the server makes of a client's parts, and which tools may be called."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from marked_texts import COMPILER, takes
from scripted_chat import HELLO
from sglang.srt.constrained.matchers import GrammarError
from sglang.srt.entrypoints.openai.chat_grammar import AnswerGrammar, grammar_of_calls
from sglang.srt.entrypoints.openai.chat_messages import messages_of, tool_use_of
from sglang.srt.entrypoints.openai.chat_protocol import UNSUPPORTED, ChatCompletionRequest
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.parser.reasoning_parser import Outset, ReasoningFormat
from sglang.srt.sampling.grammar import (
    EBNF,
    JSON_SCHEMA,
    REGEX,
    STRUCTURAL_TAG,
    Grammar,
)

NOT = {"type": "object", "not": {}}
NAMES = ("a", "b", "c")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


def request_of(**body: Any) -> ChatCompletionRequest:
    raw = msgspec.json.encode({"messages": HELLO, **body})
    return parse_struct(raw, ChatCompletionRequest, UNSUPPORTED)


def grammar_of(answer: AnswerGrammar) -> Grammar:
    return Grammar(STRUCTURAL_TAG, json.dumps(answer.tag))


def told(answer: AnswerGrammar) -> RequestError:
    """The client's error of a grammar that cannot be used."""
    with pytest.raises(GrammarError) as caught:
        COMPILER.check(grammar_of(answer))
    return answer.translate(field_error(f"sampling_params.{STRUCTURAL_TAG}", str(caught.value)))


NESTED = {"type": STRUCTURAL_TAG, "format": {"type": "json_schema", "json_schema": NOT}}
STRUCTURES = [{"begin": "<f", "schema": NOT, "end": ""}]
TRIGGERED = {"type": STRUCTURAL_TAG, "triggers": ["<f"], "structures": STRUCTURES}
UNUSED = {"type": STRUCTURAL_TAG, "triggers": ["<f", "x"], "structures": STRUCTURES}
WRONG: list[tuple[Grammar, str]] = [
    (Grammar(JSON_SCHEMA, json.dumps(NOT)), 'failed to compile JSON schema: .*"not"'),
    (Grammar(JSON_SCHEMA, "false"), "must be an object, or true; no text is of false"),
    (Grammar(REGEX, "("), ".*unclosed"),
    (Grammar(EBNF, "root ::= nobody"), ".*nobody"),
    (Grammar(EBNF, "start: nobody"), "unknown name"),
    (Grammar(STRUCTURAL_TAG, json.dumps(NESTED)), "format.json_schema: .*not"),
    (Grammar(STRUCTURAL_TAG, json.dumps(TRIGGERED)), r"structures\[0\].schema: .*not"),
    (Grammar(STRUCTURAL_TAG, json.dumps(UNUSED)), "triggers must each begin"),
]


@pytest.mark.parametrize(("grammar", "reason"), WRONG)
def test_an_error_behind_reasoning_is_told_as_without_it(grammar: Grammar, reason: str) -> None:
    for outset in (Outset.OPEN, Outset.FREE):
        held = AnswerGrammar().behind_reasoning("their_name", grammar, ReasoningFormat(), outset)
        error = told(held)
        assert error.field == "their_name"
        with pytest.raises(RequestError, match=f"^their_name: {reason}"):
            raise error
        assert "elements" not in error.message


@pytest.mark.parametrize("form", ["qwen25", "llama3", "mistral"])
@pytest.mark.parametrize("thinks", [False, True])
def test_an_error_of_calls_or_content_names_the_tool_or_the_format(form: str, thinks: bool) -> None:
    strict = {"name": "b", "parameters": NOT, "strict": True}
    tools = [TOOLS[0], {"type": "function", "function": strict}]
    good = {"type": "json_object"}
    bad = {"type": "json_schema", "json_schema": {"schema": NOT}}
    cases = ((tools, good, "tools[1].function.parameters"), (TOOLS, bad, "response_format"))
    for given, wanted, field in cases:
        request = request_of(tools=given, response_format=wanted)
        content = request.content_grammars[0]
        answer = grammar_of_calls(CALL_FORMATS[form], tool_use_of(request), content)
        if thinks:
            answer = answer.behind_reasoning("x", content[1], ReasoningFormat(), Outset.FREE)
        error = told(answer)
        assert error.field == field
        assert error.message.startswith(f"{field}: failed to compile JSON schema: Unimpl")


def test_an_error_without_a_place_is_told_of_what_the_client_has_sent() -> None:
    answer = AnswerGrammar().behind_reasoning(
        "regex", Grammar(REGEX, "a"), ReasoningFormat(), Outset.OPEN
    )
    error = answer.translate(field_error("sampling_params.structural_tag", "takes 11 ms"))
    assert error.field == "regex"
    assert error.message == "regex: takes 11 ms."
    other = field_error("temperature", "is hot")
    assert answer.translate(other) is other


# ---------------------------------------------------------------- tools that may be called


def allowed(mode: str, *names: str, is_flat: bool = False) -> dict[str, Any]:
    if is_flat:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def call_of(name: str, form: str) -> str:
    key = "parameters" if form == "llama3" else "arguments"
    text = f'{{"name": "{name}", "{key}": {{}}}}'
    if form == "qwen25":
        return f"<tool_call>\n{text}\n</tool_call>"
    return f"[TOOL_CALLS][{text}]" if form == "mistral" else f"<|python_tag|>{text}"


@pytest.mark.parametrize("form", ["qwen25", "llama3", "mistral"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_only_allowed_tools_may_be_called_and_the_model_knows_all(form: str, is_flat: bool) -> None:
    for mode in ("auto", "required"):
        request = request_of(tools=TOOLS, tool_choice=allowed(mode, "a", "c", is_flat=is_flat))
        tools = tool_use_of(request)
        assert tools.tools == TOOLS
        assert tools.names == {"a", "c"}
        assert tools.max_calls is None
        grammar = grammar_of(grammar_of_calls(CALL_FORMATS[form], tools, None))
        for name in NAMES:
            text = call_of(name, form)
            if mode == "required" and form == "llama3":
                text = text.removeprefix("<|python_tag|>")
            assert takes(grammar, text) == (name != "b")
        assert takes(grammar, "Hello") == (mode == "auto")


def test_all_tools_allowed_are_held_by_nothing_unless_one_must_be_called() -> None:
    tools = tool_use_of(request_of(tools=TOOLS, tool_choice=allowed("auto", *NAMES)))
    assert tools == tool_use_of(request_of(tools=TOOLS))
    required = tool_use_of(request_of(tools=TOOLS, tool_choice=allowed("required", *NAMES)))
    assert required == tool_use_of(request_of(tools=TOOLS, tool_choice="required"))


# ---------------------------------------------------------------- what clients send back


def test_arguments_that_are_no_object_are_an_empty_one_and_no_content_is_an_empty_text() -> None:
    given = [None, "", "{", "no JSON", "[1]", [1], 3, "null", '"{}"', '{"a": 1}', {"a": 1}]
    calls = [{"id": "x", "function": {"name": "f", "arguments": item}} for item in given]
    missing = {"id": "x", "function": {"name": "f"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [*calls, missing]},
        {"role": "tool", "content": None, "tool_call_id": "x"},
        {"role": "tool", "tool_call_id": "x"},
    ]
    found = messages_of(request_of(messages=messages))
    arguments = [call["function"]["arguments"] for call in found[1]["tool_calls"]]
    assert arguments == [*itertools.repeat({}, 9), {"a": 1}, {"a": 1}, {}]
    assert [message["content"] for message in found[2:]] == ["", ""]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_nulls_in_parameters_are_not_given(choice: str) -> None:
    parameters = {"type": "object", "properties": {"x": {"required": None}}, "required": None}
    function = {"name": "f", "parameters": parameters, "strict": True}
    tools = [{"type": "function", "function": function}]
    found = tool_use_of(request_of(tools=tools, tool_choice=choice))
    assert found.tools is not None
    plain = {"type": "object", "properties": {"x": {}}}
    assert found.tools[0]["function"] == {**function, "parameters": plain}
    COMPILER.check(grammar_of(grammar_of_calls(CALL_FORMATS["qwen25"], found, None)))
