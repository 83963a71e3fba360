"""The place where reasoning of a chat begins, and grammars after it: a scripted scheduler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from chat_template_cases import DEEPSEEK, QWEN
from marked_texts import takes
from scripted_chat import HELLO, Chat, chat, refused, settings_of
from serving_utils import make_model_dir
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS
from sglang.srt.parser.template_files import TemplateFiles
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

# Begins an answer with what a chat says, and knows of reasoning.
TURNS = (
    "{# <think> #}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ opening }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
OPENED = {"chat_template_kwargs": {"opening": OPEN}}
OUTPUT = "a b</think>\n\nc"
SPLIT, WHOLE = ("a b", "c"), ("", OUTPUT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def turns() -> Iterator[ChatSettings]:
    settings = settings_of(TURNS, "qwen25", "qwen3")
    yield settings
    settings.templates.close()


def with_form(settings: ChatSettings, name: str) -> ChatSettings:
    return dataclasses.replace(settings, reasoning=REASONING_FORMATS[name])


def parts(found: Chat, stream: bool) -> tuple[str, str]:
    if stream:
        return found.joined("reasoning_content"), found.joined("content")
    message = found.choice["message"]
    return message["reasoning_content"] or "", message["content"] or ""


def said(user: str, *others: tuple[str, str]) -> list[dict[str, Any]]:
    roles = [("user", user), *others]
    return [{"role": role, "content": content} for role, content in roles]


THOUGHT = ("assistant", "<think>\nx\n</think>\n\ny")
UNENDED = ("assistant", "<think>\nx")
# Name: messages, what begins the answer, whether the output begins within reasoning; None: as the
# form says.
TURN_CASES: dict[str, tuple[list[dict[str, Any]], str, bool | None]] = {
    "no mark": (said("hi"), "", None),
    "open": (said("hi"), OPEN, True),
    "open and no line": (said("hi"), "<think>", True),
    "closed": (said("hi"), CLOSED, False),
    "the user writes a mark": (said("say <think>"), "", None),
    "the user writes a mark, and thinking is closed": (said("say <think>"), CLOSED, False),
    "the user writes an end, and thinking is open": (said("say </think>"), OPEN, True),
    "the user's text is in what begins an answer": (said("think"), OPEN, True),
    "an earlier answer has marks": (said("hi", THOUGHT, ("user", "so")), "", None),
    "an earlier answer has no end": (said("hi", UNENDED, ("user", "so")), "", None),
    "the same, and thinking is open": (said("hi", THOUGHT, ("user", "so")), OPEN, True),
    "a tool writes a mark": (said("hi", ("assistant", "y"), ("tool", "<think>")), "", None),
    "a tool's text, and thinking is open": (said("hi", ("tool", "</think>")), OPEN, True),
    "an answer that is over has marks": (said("hi", UNENDED), "", None),
    "a last word of the system": (said("hi", ("system", "use <think>")), "", None),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "<think>"}]}], "", None),
}


@pytest.mark.parametrize("form", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize("name", TURN_CASES)
def test_the_last_mark_behind_what_is_over_decides(
    tokenizer: Tokenizer, turns: ChatSettings, name: str, form: str
) -> None:
    messages, opening, is_open = TURN_CASES[name]
    settings = with_form(turns, form)
    if is_open is None:
        is_open = form != "qwen3"
    body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"opening": opening}}
    stream = form == "deepseek-r1"
    found = chat(tokenizer, settings, OUTPUT, 2, stream=stream, **body)
    assert parts(found, stream) == (SPLIT if is_open else WHOLE)


# Name: what the assistant has said, the parts of an output for qwen3 and for the others.
CONTINUED: dict[str, tuple[str, tuple[str, str], tuple[str, str]]] = {
    "within thinking": ("<think>I s", (" ee.", "So"), (" ee.", "So")),
    "thinking just begun": ("<think>\n", ("ee.", "So"), ("ee.", "So")),
    "thinking is over": (
        "<think>I</think>H",
        ("", " ee. </think>\n So"),
        ("", " ee. </think>\n So"),
    ),
    "no thinking": ("H", ("", " ee. </think>\n So"), ("ee.", "So")),
}


@pytest.mark.parametrize("form", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize("name", CONTINUED)
def test_a_continued_answer_goes_on_where_it_is(
    tokenizer: Tokenizer, turns: ChatSettings, name: str, form: str
) -> None:
    """Whatever the user has said."""
    text, of_qwen3, of_others = CONTINUED[name]
    expected = of_qwen3 if form == "qwen3" else of_others
    for user, stream in (("<think>", False), ("I", True), ("</think>", False)):
        messages = said(user, ("assistant", text))
        flags = {"messages": messages, "continue_final_message": True, "stream": stream}
        settings = with_form(turns, form)
        found = chat(tokenizer, settings, " ee. </think>\n So", 4, **flags)
        assert found.prompt.endswith(f"<|assistant|>{text}")
        assert parts(found, stream) == expected


@pytest.mark.parametrize("form", ["qwen3", "deepseek-r1"])
def test_a_call_behind_closed_thinking_is_found(
    tokenizer: Tokenizer, turns: ChatSettings, form: str
) -> None:
    body = {"tools": TOOLS, "chat_template_kwargs": {"opening": CLOSED}}
    found = chat(tokenizer, with_form(turns, form), f"Sure\n{CALL_TEXT}", **body)
    message = found.choice["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Sure")
    assert len(message["tool_calls"]) == 1


def test_tokens_of_reasoning_follow_the_same_rule(
    tokenizer: Tokenizer, turns: ChatSettings
) -> None:
    num_thought = len(tokenizer.encode("a b</think>", False))
    for text, num in (("<think>x", num_thought), ("<think>x</think>y", 0)):
        messages = said("</think>", ("assistant", text))
        flags = {"messages": messages, "continue_final_message": True}
        (answer,) = chat(tokenizer, with_form(turns, "deepseek-r1"), OUTPUT, **flags).answers
        details = answer["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": num}


@pytest.mark.parametrize(
    ("template", "enabled", "is_open"),
    [(QWEN, True, True), (QWEN, False, False), (DEEPSEEK, True, True)],
)
def test_templates_of_models(
    tokenizer: Tokenizer, template: str, enabled: bool, is_open: bool
) -> None:
    settings = settings_of(template, "qwen25", "qwen3-thinking")
    tool = {"role": "tool", "content": "<think>", "tool_call_id": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]}
    answered = {"role": "assistant", "content": "y", "reasoning_content": "x"}
    for messages in ([*HELLO], [*HELLO, answered, *HELLO], [*HELLO, call, tool]):
        body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": enabled}}
        found = chat(tokenizer, settings, OUTPUT, **body)
        assert parts(found, False) == (SPLIT if is_open else WHOLE)
    settings.templates.close()


IDS: dict[str, tuple[str, bool | None]] = {
    "open": ("<|user|>hi<|end|><|assistant|><think>\n", True),
    "open, and text": ("<|user|>hi<|end|><|assistant|><think>\nwell" + 40 * " then", True),
    "closed": ("<|user|>hi<|end|><|assistant|><think>\n</think>\n", False),
    "the user's": ("<|user|><think><|end|><|assistant|>", None),
    "earlier": ("<|user|>a<|end|><|assistant|></think>b<|end|><|user|>c<|end|><|assistant|>", None),
    "of another form": ("x<think>\n", True),
    "of another form, closed": ("x<think>\n</think>so", False),
    "no mark": ("x", None),
}


@pytest.mark.parametrize("form", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize("name", IDS)
def test_ids_follow_the_same_rule(
    tokenizer: Tokenizer, turns: ChatSettings, name: str, form: str
) -> None:
    text, is_open = IDS[name]
    if is_open is None:
        is_open = form != "qwen3"
    ids = tokenizer.encode(text, False)
    found = chat(tokenizer, with_form(turns, form), OUTPUT, input_ids=ids, messages=[])
    assert parts(found, False) == (SPLIT if is_open else WHOLE)


def test_ids_need_no_template(tokenizer: Tokenizer) -> None:
    templates = ChatTemplates(TemplateFiles(problem="there is none"))
    settings = ChatSettings(templates, reasoning=REASONING_FORMATS["qwen3"])
    ids = tokenizer.encode("x<think>\n", False)
    found = chat(tokenizer, settings, OUTPUT, input_ids=ids, messages=[])
    assert parts(found, False) == SPLIT


# ---------------------------------------------------------------- grammars behind reasoning

PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
STRUCTURE = {"begin": "<f>", "schema": PERSON, "end": ""}
TAG = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f"]}
# Name: fields of a body, a content that matches, one that does not.
HELD: dict[str, tuple[dict[str, Any], str, str]] = {
    "response_format": ({"response_format": FORMAT}, '{"a": 1}', '{"a": "x"}'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
    "json_schema": ({"json_schema": json.dumps(PERSON)}, '{"a": 1}', "{}"),
    "regex": ({"regex": "    return x"}, "    return x", "return x"),
    "ebnf": ({"ebnf": 'root ::= "a" root | "b"'}, "aab", "aa"),
    "structural_tag": ({"response_format": TAG}, 'so <f>{"a": 1}', "so <f>{}"),
    "calls": ({"tools": TOOLS, "tool_choice": "required"}, CALL_TEXT, "so"),
    "either, a call": ({"tools": TOOLS, "response_format": FORMAT}, CALL_TEXT, "so"),
    "either, the format": ({"tools": TOOLS, "response_format": FORMAT}, '{"a": 1}', "{}"),
}


@pytest.mark.parametrize("opening", ["", OPEN, CLOSED])
@pytest.mark.parametrize("name", HELD)
def test_reasoning_comes_first_then_the_grammar_holds(
    tokenizer: Tokenizer, turns: ChatSettings, name: str, opening: str
) -> None:
    body, good, bad = HELD[name]
    start = "" if opening else "<think>"
    thoughts = [f"{start}I <b> {{\n</think>\n\n"] if opening != CLOSED else []
    if opening != OPEN:
        thoughts.append("")
    for thought in thoughts:
        stream = bool(thought)
        flags = {"stream": stream, "chat_template_kwargs": {"opening": opening}, "max_tokens": 10}
        found = chat(tokenizer, turns, thought + good, 5, **body, **flags)
        assert found.prompt.endswith(f"<|assistant|>{opening}")
        reasoning, content = parts(found, stream)
        assert reasoning == ("I <b> {" if thought else "")
        assert content == ("" if good == CALL_TEXT else good)
        (grammar,) = found.params.grammars
        assert takes(grammar, thought + good)
        assert not takes(grammar, thought + bad)
    if name != "structural_tag":  # of free text, too
        thought_and_good = f"{start}x</think>\n\n{good}"
        assert takes(grammar, thought_and_good) == (opening != CLOSED)
        assert not takes(grammar, "x" + good)


def test_a_model_whose_template_knows_no_reasoning_has_none_before_a_format(
    tokenizer: Tokenizer,
) -> None:
    """A weak model might open what it never ends."""
    settings = settings_of(TURNS.replace("<think>", ""), "qwen25", "qwen3")
    found = chat(tokenizer, settings, "<think>a", regex="<think>a")
    assert found.params.regex == "<think>a"
    assert found.choice["message"]["content"] == "<think>a"
    (answer,) = found.answers
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    opened = chat(tokenizer, settings, "a</think>\n\nb", regex="b", **OPENED)
    assert parts(opened, False) == ("a", "b")
    settings.templates.close()


def test_reasoning_that_may_not_be_told_apart_ends_in_the_prompt(
    tokenizer: Tokenizer, turns: ChatSettings
) -> None:
    """Else the content would not match."""
    body = {"response_format": FORMAT, **OPENED}
    found = chat(tokenizer, turns, '{"a": 1}', separate_reasoning=False, **body)
    assert found.prompt.endswith("<|assistant|><think>\n</think>\n\n")
    assert json.loads(found.params.json_schema) == PERSON
    assert found.choice["message"]["content"] == '{"a": 1}'


def test_tokens_of_reasoning_before_a_format_count(
    tokenizer: Tokenizer, turns: ChatSettings
) -> None:
    body = {"response_format": FORMAT, **OPENED}
    (answer,) = chat(tokenizer, turns, 'hm</think>\n\n{"a": 1}', **body).answers
    num = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num == len(tokenizer.encode("hm</think>", False))


@pytest.mark.parametrize("opening", ["", OPEN])
@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("json_schema", {"json_schema": "{"}),
        ("structural_tag", {"structural_tag": '{"type": "regex", "pattern": "a"}'}),
        ("response_format", {"tools": TOOLS, "response_format": FORMAT, "json_schema": "{}"}),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_by_its_name(
    tokenizer: Tokenizer, turns: ChatSettings, field: str, body: dict[str, Any], opening: str
) -> None:
    refused(tokenizer, turns, field, chat_template_kwargs={"opening": opening}, **body)
