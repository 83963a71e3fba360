"""Calls, reasoning and texts that a real model says, through the Engine's processes and the code of
`/v1/chat/completions`: a stream and a whole answer give the same parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import sglang
from scripted_model import FOLDER, TEXTS, TOOLS, messages_of, prompt_of
from sglang.srt.entrypoints.openai.chat_protocol import UNSUPPORTED, ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings, chat_settings_of
from sglang.srt.entrypoints.openai.serving_chat import ChatCompletion
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS

pytestmark = pytest.mark.long_matrix

Body = dict[str, Any]
PARIS, CET = ("get_weather", {"city": "Paris"}), ("get_time", {"zone": "CET"})
OPEN = "<think>\n"
JSON_ANSWER = '{"name": "Ada", "age": 36}'
PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}
FORM = {"response_format": PERSON}
WHO, WEATHER = "A name is asked for.", "I need the weather."
CALLS: list[tuple[str, str, str | None, list[Any]]] = [  # format, text, content, calls
    ("hermes", "hermes", None, [PARIS]),
    ("hermes", "hermes_around", "Sure Done.", [PARIS]),
    ("hermes", "hermes_two", None, [PARIS, CET]),
    ("hermes", "hermes_two_in_one", None, [PARIS, CET]),
    ("hermes", "hermes_list", None, [PARIS, CET]),
    ("hermes", "hermes_text_arguments", None, [PARIS]),
    ("hermes", "hermes_raw_newline", None, [("write", {"text": "one\n\ttwo"})]),
    ("hermes", "hermes_trailing_comma", None, [PARIS]),
    ("hermes", "hermes_fenced", None, [PARIS]),
    ("hermes", "answer", "The answer is Four.", []),
    ("llama3", "llama3", None, [PARIS]),
    ("llama3", "llama3_tag", None, [PARIS]),
    ("llama3", "llama3_newline", None, [PARIS, CET]),
    ("llama3", "llama3_joined", None, [PARIS, CET]),
    ("llama3", "llama3_comma", None, [PARIS, CET]),
    ("llama3", "llama3_semicolon", None, [PARIS, CET]),
    ("llama3", "llama3_list", None, [PARIS, CET]),
    ("llama3", "llama3_sentence", "I will look it up.", [PARIS]),
    ("llama3", "llama3_function", None, [PARIS]),
    ("llama3", "llama3_null", None, [("get_time", {})]),
    ("mistral", "mistral_list", None, [PARIS, CET]),
    ("mistral", "mistral_named", None, [PARIS]),
    ("mistral", "mistral_id", None, [PARIS]),
    ("mistral", "mistral_several", None, [PARIS, CET]),
]
# format, text, what the template opens with, reasoning, content, calls, more of the body
REASONING: list[tuple[str, str, str, str | None, str | None, list[Any], dict[str, Any]]] = [
    ("qwen3", "think", "", "Two and two.", "Four.", [], {}),
    ("qwen3", "think_end", OPEN, "Two and two.", "Four.", [], {}),
    ("deepseek-r1", "think_end", OPEN, "Two and two.", "Four.", [], {}),
    ("qwen3-thinking", "think_end", "", "Two and two.", "Four.", [], {}),
    ("qwen3-thinking", "hermes", f"{OPEN}\n</think>\n\n", None, None, [PARIS], {}),
    ("deepseek-r1", "answer", "<think></think>\n", None, "The answer is Four.", [], {}),
    ("qwen3", "think_call", "", WEATHER, None, [PARIS], {}),
    ("deepseek-r1", "think_end_call", OPEN, WEATHER, None, [PARIS], {}),
    ("qwen3", "think_only", "", "Nothing is left to say.", None, [], {}),
    ("qwen3", "think_end_json", OPEN, WHO, JSON_ANSWER, [], {}),
    ("qwen3", "think_json", "", WHO, JSON_ANSWER, [], FORM),
    ("qwen3", "think_end_json", OPEN, WHO, JSON_ANSWER, [], FORM),
    ("qwen3", "think_end_json", OPEN, WHO, JSON_ANSWER, [], {**FORM, "tools": TOOLS}),
    ("qwen3", "think_end_call", OPEN, WEATHER, None, [PARIS], FORM),
    ("deepseek-r1", "json", "<think></think>\n", None, JSON_ANSWER, [], FORM),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[sglang.Engine]:
    with sglang.Engine(model_path=str(FOLDER), max_total_tokens=4096) as engine:
        yield engine


@pytest.fixture(scope="module")
def settings(engine: sglang.Engine) -> Iterator[ChatSettings]:
    found = chat_settings_of(engine.server_args)
    yield found
    found.templates.close()


async def message_of(engine: sglang.Engine, settings: ChatSettings, body: Body) -> dict[str, Any]:
    """The message of a whole answer, which must be what a stream's chunks put together are."""

    async def answers(is_stream: bool) -> list[dict[str, Any]]:
        raw = msgspec.json.encode(
            {"temperature": 0, "max_tokens": 200, **body, "stream": is_stream}
        )
        request = parse_struct(raw, ChatCompletionRequest, UNSUPPORTED)
        chat = ChatCompletion(engine._runtime.manager, settings, request, "model")
        return [each async for each in (chat.chunks() if is_stream else chat.answer())]

    [whole], chunks = await asyncio.gather(answers(False), answers(True))
    [choice] = whole["choices"]
    message = _parts_of(choice["message"])
    assert _joined(chunks) == message | {"finish_reason": choice["finish_reason"]}
    return message


def ask(engine: sglang.Engine, chats: list[tuple[ChatSettings, Body]]) -> list[Any]:
    """The messages of chats that run at once, or what was raised in their place."""

    async def messages() -> list[Any]:
        asked = (message_of(engine, settings, body) for settings, body in chats)
        return await asyncio.gather(*asked, return_exceptions=True)

    return engine._runtime.wait_for(messages())


def _parts_of(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"] or ()
    ]
    return {
        "content": message["content"],
        "reasoning": message["reasoning_content"],
        "calls": calls,
    }


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    message = {
        "content": "".join(delta.get("content") or "" for delta in deltas) or None,
        "reasoning_content": "".join(d.get("reasoning_content") or "" for d in deltas) or None,
        "tool_calls": [call for delta in deltas for call in delta.get("tool_calls") or ()],
    }
    return _parts_of(message) | {"finish_reason": choices[-1]["finish_reason"]}


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_calls_are_found_in_what_the_model_says(
    engine: sglang.Engine, settings: ChatSettings, form: str
) -> None:
    settings = replace(settings, calls=CALL_FORMATS[form])
    expected = {
        name: {"content": content, "reasoning": None, "calls": calls}
        for each, name, content, calls in CALLS
        if each == form
    }
    bodies = [{"messages": messages_of(name), "tools": TOOLS} for name in expected]
    found = ask(engine, [(settings, body) for body in bodies])
    assert dict(zip(expected, found, strict=True)) == expected


def test_reasoning_is_told_apart(engine: sglang.Engine, settings: ChatSettings) -> None:
    settings = replace(settings, calls=CALL_FORMATS["hermes"])
    chats, expected = [], []
    for form, name, opening, reasoning, content, calls, more in REASONING:
        body = {"messages": messages_of(name), "chat_template_kwargs": {"opening": opening}, **more}
        tools = {"tools": TOOLS} if calls else {}
        chats.append((replace(settings, reasoning=REASONING_FORMATS[form]), body | tools))
        expected.append({"content": content, "reasoning": reasoning, "calls": calls})
    found = ask(engine, chats)
    for case, message, right in zip(REASONING, found, expected, strict=True):
        assert message == right, case


def test_texts_of_all_kinds_come_whole(engine: sglang.Engine, settings: ChatSettings) -> None:
    settings = replace(settings, reasoning=REASONING_FORMATS["qwen3"])
    names = ["emoji", "scripts", "markup", "code", "spaces"]
    chats = [(settings, {"messages": messages_of(name)}) for name in names]
    texts = [message["content"] for message in ask(engine, chats)]
    assert texts == [TEXTS[name] for name in names]


def test_the_model_says_all_its_texts(engine: sglang.Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 200, "skip_special_tokens": False}
    found = engine.generate([prompt_of(name) for name in TEXTS], params)
    assert [item["text"] for item in found] == list(TEXTS.values())
