"""`/v1/chat/completions` against a scripted scheduler: prompts, parts of answers, chunks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chat_template_cases import CALL, DEEPSEEK, QWEN, TOOL
from scripted_chat import HELLO, Chat, chat, refused, settings_of
from sentencepiece_models import LAYOUTS, make_sentencepiece_dir
from serving_utils import make_model_dir
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.openai.chat_messages import tool_use_of
from sglang.srt.entrypoints.openai.chat_protocol import UNSUPPORTED, ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings, chat_settings_of
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import RequestError
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS
from sglang.srt.parser.template_files import TemplateFiles
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{{ reasoning_effort }}"
    "{% if documents %}{{ documents | tojson }}{% endif %}"
)
SMALL = {"type": "function", "function": {"name": "weather"}}
TOOLS = {"tools": [SMALL], "messages": HELLO}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain() -> Iterator[ChatTemplates]:
    templates = ChatTemplates(TemplateFiles({"default": PLAIN}))
    yield templates
    templates.close()


@pytest.fixture(scope="module")
def qwen() -> Iterator[ChatSettings]:
    templates = ChatTemplates(TemplateFiles({"default": QWEN}))
    yield ChatSettings(templates, CALL_FORMATS["qwen25"], REASONING_FORMATS["qwen3"])
    templates.close()


# ---------------------------------------------------------------- prompts


def test_prompt_is_the_template_s_without_a_bos_of_the_tokenizer(
    tokenizer: Tokenizer, plain: ChatTemplates
) -> None:
    assert chat(tokenizer, plain).prompt == "user: hello\nassistant: "
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "x", "name": "n"},
        {"role": "user", "content": parts},
    ]
    assert chat(tokenizer, plain, messages=messages).prompt == ("system: x\nuser: a b\nassistant: ")


def test_a_continued_message_ends_the_prompt(tokenizer: Tokenizer, plain: ChatTemplates) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hello wor"}]
    found = chat(tokenizer, plain, messages=messages, continue_final_message=True)
    assert found.prompt == "user: hello\nassistant: hello wor"
    refused(tokenizer, plain, "continue_final_message", continue_final_message=True)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(tokenizer, plain, "add_generation_prompt", messages=messages, **both)


def test_variables_reach_the_template(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    found = chat(tokenizer, qwen, chat_template_kwargs={"enable_thinking": False})
    assert found.prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    plain = ChatTemplates(TemplateFiles({"default": PLAIN}))
    assert chat(tokenizer, plain, reasoning_effort="low").prompt.endswith("assistant: low")
    plain.close()
    kwargs = {"messages": []}
    refused(tokenizer, qwen, "chat_template_kwargs.messages", chat_template_kwargs=kwargs)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", 0.5])
def test_a_template_that_reads_no_effort_goes_on_as_without(
    tokenizer: Tokenizer, qwen: ChatSettings, effort: str | float
) -> None:
    found = chat(tokenizer, qwen, reasoning_effort=effort)
    assert found.prompt == chat(tokenizer, qwen).prompt


def test_ids_stand_for_messages(tokenizer: Tokenizer, plain: ChatTemplates) -> None:
    ids = tokenizer.encode("the quick")
    found = chat(tokenizer, plain, input_ids=ids, messages=[], return_token_ids=True)
    assert found.choice["prompt_token_ids"] == ids
    refused(tokenizer, plain, "input_ids[1]", input_ids=[1, 99999])


def test_all_that_is_left_of_the_context_is_the_default_length(
    tokenizer: Tokenizer, plain: ChatTemplates
) -> None:
    num_prompt = len(tokenizer.encode("user: hello\nassistant: ", False))
    assert chat(tokenizer, plain).params.max_new_tokens == 256 - num_prompt
    assert chat(tokenizer, plain, max_tokens=7).params.max_new_tokens == 7
    assert chat(tokenizer, plain, max_completion_tokens=8).params.max_new_tokens == 8
    assert chat(tokenizer, plain, min_tokens=200).params.max_new_tokens == 256 - num_prompt


def test_no_template_is_one_clear_refusal(tokenizer: Tokenizer) -> None:
    templates = ChatTemplates(TemplateFiles(problem="there is none; use --chat-template FILE"))
    refused(tokenizer, templates, "messages", "--chat-template")


DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "hello " * 300}]}),
    ("max_tokens", {"messages": HELLO, "max_tokens": 1000}),
    ("max_completion_tokens", {"messages": HELLO, "max_completion_tokens": 1000}),
    ("messages", {"messages": HELLO * 20_000}),
    (
        "messages[0].content",
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 20_000}]},
    ),
    ("messages", {"chat_template_kwargs": {"large": 2**70}}),
    ("messages", {"chat_template_kwargs": {"documents": DEEP}, "n": 2}),
    ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].weight", {"messages": [{"role": "user", "content": "x", "weight": 1}]}),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    (
        "tool_choice.allowed_tools.mode",
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
    ),
    (
        "tool_choice.tools",
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    ),
    (
        "tool_choice.tools[0].name",
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
    ),
    ("max_completion_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 99, "logprobs": True}),
    ("temperature", {"temperature": -1}),
    ("seed", {"seed": "x"}),
    ("n", {"n": 99}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
    ),
    (
        "response_format",
        {
            "response_format": {"type": "json_object"},
            "min_tokens": 1,
            "max_tokens": 2,
            "json_schema": "{}",
        },
    ),
    ("response_format.type", {"response_format": {}}),
    ("tools", {"tools": [TOOL]}),  # this server has no parser
    ("stop_token_ids[0]", {"stop_token_ids": [10**6]}),
    ("input_ids[1]", {"input_ids": [5, 10**6]}),
    ("input_ids[0]", {"input_ids": [10**6, 5]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[0].function.strict", {"tools": [{**SMALL, "function": {"name": "a", "strict": 1}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": "any", "tools": [TOOL]}),
    (
        "tool_choice.function.name",
        {"tool_choice": {**CALL, "function": {"name": "x"}}, "tools": [TOOL]},
    ),
    ("functions", {"functions": [{"name": "f"}]}),
    ("audio", {"audio": {"voice": "x"}}),
    ("ebnf", {"regex": "a", "ebnf": "b"}),
    ("min_tokens", {"response_format": {"type": "json_object"}, "min_tokens": 1}),
    ("nonsense", {"nonsense": 1}),
]


@pytest.mark.parametrize(("field", "body"), BAD)
def test_what_is_wrong_is_named(
    tokenizer: Tokenizer, plain: ChatTemplates, field: str, body: dict[str, Any]
) -> None:
    refused(tokenizer, plain, field, **body)


# ---------------------------------------------------------------- answers


def test_whole_answer(tokenizer: Tokenizer, plain: ChatTemplates) -> None:
    found = chat(tokenizer, plain, "hello world")
    (answer,) = found.answers
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == 3
    message = {"role": "assistant", "content": "hello world"}
    assert found.choice["message"] == {**message, "reasoning_content": None, "tool_calls": None}
    assert found.choice["finish_reason"] == "stop"
    assert found.choice["matched_stop"] == "<eos>"


def test_several_samples_are_choices(tokenizer: Tokenizer, plain: ChatTemplates) -> None:
    (answer,) = chat(tokenizer, plain, n=3, seed=4).answers
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_chunks_are_the_role_the_text_the_end_and_the_usage(
    tokenizer: Tokenizer, plain: ChatTemplates, size: int
) -> None:
    options = {"include_usage": True}
    found = chat(tokenizer, plain, "hello é😀 world", size, stream=True, stream_options=options)
    *chunks, usage = found.answers
    assert found.deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert found.joined("content") == "hello é😀 world"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert found.deltas[-1] == {"reasoning_content": None}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokenizer.encode("hello é😀 world", False))
    assert {chunk["object"] for chunk in found.answers} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in found.answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_ids_are_of_every_token(
    tokenizer: Tokenizer, plain: ChatTemplates, stream: bool
) -> None:
    wanted = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    found = chat(tokenizer, plain, "hello é 😀", 1, stream=stream, **wanted)
    ids = tokenizer.encode("hello é 😀", False)
    choices = [answer["choices"][0] for answer in found.answers]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [tokenizer.decode([i], False) for i in ids]
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 1 for entry in entries)
    assert [i for c in choices for i in c.get("response_token_ids", [])] == ids
    prompt = tokenizer.encode("user: hello\nassistant: ", False)
    assert choices[0]["prompt_token_ids"] == prompt


@pytest.mark.parametrize("layout", ["bytes", *LAYOUTS])
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_tokens_are_the_text_of_the_answer(
    tmp_path: Path, tokenizer: Tokenizer, plain: ChatTemplates, layout: str, stream: bool
) -> None:
    if layout != "bytes":
        tokenizer = load_tokenizer(make_sentencepiece_dir(tmp_path, layout))
    output = "hello é 漢😀𝄞"
    found = chat(tokenizer, plain, output, 1, stream=stream, logprobs=True, top_logprobs=1)
    logprobs = [answer["choices"][0]["logprobs"] for answer in found.answers]
    entries = [entry for item in logprobs if item for entry in item["content"]]
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert text == ("" if layout == "bytes" else " ") + output
    assert text == (found.joined("content") if stream else found.choice["message"]["content"])
    assert any(entry["token"] == "\ufffd" for entry in entries)
    for entry in entries:
        (best,) = entry["top_logprobs"]
        assert best == {name: entry[name] for name in ("token", "logprob", "bytes")}


def test_formats_are_schemas_and_regex_and_ebnf_are_taken(
    tokenizer: Tokenizer, plain: ChatTemplates
) -> None:
    anything = chat(tokenizer, plain, "{}", response_format={"type": "json_object"}).params
    assert json.loads(anything.json_schema) == {"type": "object"}
    assert chat(tokenizer, plain, response_format={"type": "text"}).params.grammar is None
    assert chat(tokenizer, plain, regex="a+").params.regex == "a+"
    assert chat(tokenizer, plain, ebnf="root ::= [a]").params.ebnf == "root ::= [a]"
    tag = {"type": "structural_tag", "structures": [], "triggers": ["<é"]}
    params = chat(tokenizer, plain, response_format=tag).params
    assert json.loads(params.structural_tag) == tag
    assert params.json_schema is None


def test_only_a_schema_leaves_room_for_calls(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    wanted = {"response_format": {"type": "json_object"}}
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    refused(tokenizer, qwen, "response_format", "tool_choice", **TOOLS, response_format=tag)
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        if name != "json_schema":
            refused(tokenizer, qwen, name, "tool_choice", **TOOLS, **{name: "{}"})
        refused(tokenizer, qwen, "response_format", f"beside {name}", **wanted, **{name: "{}"})
    found = chat(tokenizer, qwen, "{}", **TOOLS, tool_choice="none", **wanted)
    assert found.params.grammar is not None


# ---------------------------------------------------------------- calls and reasoning

OUTPUT = f"<think>\nLet me see.\n</think>\n\nI ask.\n{CALL_TEXT}\n{CALL_TEXT}"


def test_answer_has_reasoning_content_and_calls(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    found = chat(tokenizer, qwen, OUTPUT, **TOOLS, max_tokens=10)
    message = found.choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "I ask.")
    calls = message["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "é"}] * 2
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert len({call["id"] for call in calls}) == 2
    assert found.choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("streams_reasoning", [False, True])
def test_chunks_have_what_the_answer_has(
    tokenizer: Tokenizer, qwen: ChatSettings, size: int, streams_reasoning: bool
) -> None:
    flags = {"stream": True, "stream_reasoning": streams_reasoning, "max_tokens": 10}
    found = chat(tokenizer, qwen, OUTPUT, size, **TOOLS, **flags)
    assert found.joined("reasoning_content") == "Let me see."
    assert found.joined("content") == "I ask."
    calls = [call for delta in found.deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert found.answers[-1]["choices"][0]["finish_reason"] == "tool_calls"
    if not streams_reasoning:
        assert sum(bool(delta.get("reasoning_content")) for delta in found.deltas) == 1


def test_reasoning_stays_in_the_content_if_that_is_wanted(
    tokenizer: Tokenizer, qwen: ChatSettings
) -> None:
    message = chat(tokenizer, qwen, "<think>a</think>b", separate_reasoning=False).choice["message"]
    assert message["content"] == "<think>a</think>b"


def test_without_tools_there_are_no_calls(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    found = chat(tokenizer, qwen, CALL_TEXT, **TOOLS, tool_choice="none")
    assert "weather" not in found.prompt
    assert found.choice["message"]["content"] == CALL_TEXT
    assert found.choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("output", "content"),
    [(f"\n{CALL_TEXT}\n \n", None), (f"Sure {CALL_TEXT} Done.", "Sure Done.")],
)
def test_white_space_around_calls_parts_words_and_is_no_content_alone(
    tokenizer: Tokenizer, qwen: ChatSettings, output: str, content: str | None
) -> None:
    message = chat(tokenizer, qwen, output, **TOOLS, max_tokens=10).choice["message"]
    assert (message["content"], len(message["tool_calls"])) == (content, 1)
    found = chat(tokenizer, qwen, output, 1, **TOOLS, max_tokens=10, stream=True)
    assert found.joined("content") == (content or "")


def test_broken_calls_are_content(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    text = '<tool_call>\n{"name": weather}\n</tool_call>'
    message = chat(tokenizer, qwen, text, **TOOLS, max_tokens=10).choice["message"]
    assert (message["content"], message["tool_calls"]) == (text, None)


NAMED = {"type": "function", "function": {"name": "weather"}}


def tag_of(chat: Chat) -> Any:
    return json.loads(chat.params.structural_tag)["format"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_is_held_by_a_grammar(tokenizer: Tokenizer, choice: Any) -> None:
    settings = settings_of(PLAIN, "qwen25")
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    other = {"type": "function", "function": {"name": "time", "strict": True}}
    weather = {"name": "weather", "parameters": schema}
    tools = [{"type": "function", "function": weather}, other]
    body = {"tools": tools, "tool_choice": choice, "max_tokens": 10}
    found = chat(tokenizer, settings, CALL_TEXT, **body)
    assert found.prompt == chat(tokenizer, settings, **body | {"tool_choice": "auto"}).prompt
    (call,) = found.choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "é"}
    form = tag_of(found)
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    nothing = {"type": "object", "additionalProperties": False}
    assert schemas == [{**schema, "type": "object"}, nothing][: 2 if choice == "required" else 1]
    assert form["stop_after_first"] is (choice == NAMED)
    single = chat(tokenizer, settings, CALL_TEXT, **body, parallel_tool_calls=False)
    assert tag_of(single)["stop_after_first"]
    settings.templates.close()


def test_strict_functions_are_held_where_the_model_may_choose(
    tokenizer: Tokenizer, qwen: ChatSettings
) -> None:
    """And reasoning is as free as without them."""
    function = {"name": "strict", "strict": True, "parameters": {"type": ["object", "null"]}}
    tools = [SMALL, {"type": "function", "function": function}]
    found = chat(tokenizer, qwen, OUTPUT, tools=tools, max_tokens=10)
    form = tag_of(found)
    assert form["triggers"] == ["<tool_call>"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [{"type": "object"}] * 2
    message = found.choice["message"]
    assert message["reasoning_content"] == "Let me see."
    assert len(message["tool_calls"]) == 2
    assert chat(tokenizer, qwen, "Hi", tools=[SMALL]).params.grammar is None
    assert chat(tokenizer, qwen, "Hi", tools=tools, tool_choice="none").params.grammar is None
    bare = settings_of(PLAIN, "llama3")
    refused(tokenizer, bare, "tools[1].function.strict", "required", tools=tools)
    text = '{"name": "strict", "parameters": {}}'
    forced = chat(tokenizer, bare, text, tools=tools, tool_choice="required")
    assert forced.choice["finish_reason"] == "tool_calls"
    bare.templates.close()


@pytest.mark.parametrize(
    ("field", "match", "body"),
    [
        ("min_tokens", "tool_choice says", {"min_tokens": 2}),
        ("mtp_enabled", "mtp", {"mtp_enabled": True}),
        ("tools", r"parameters of tools have \d{6} bytes .* than 65536", {"tools": [SMALL] * 900}),
        (
            "tools[0].function.parameters.type",
            "must be object",
            {"tools": [{**SMALL, "function": {"name": "f", "parameters": {"type": "string"}}}]},
        ),
    ],
)
def test_what_is_wrong_with_a_forced_call_is_said_in_the_client_s_terms(
    tokenizer: Tokenizer, qwen: ChatSettings, field: str, match: str, body: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        chat(tokenizer, qwen, **{**TOOLS, "tool_choice": "required", **body})
    assert caught.value.field == field
    assert "structural_tag" not in caught.value.message


@pytest.mark.parametrize("strict", [False, True])
def test_what_tools_say_to_the_model_is_no_part_of_the_grammar(
    tokenizer: Tokenizer, strict: bool
) -> None:
    """Only its prompt has it, however long it is."""
    word = {"type": "string", "description": "a word " * 300}
    parameters = {"type": "object", "properties": {"title": word}, "title": "a title"}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(40)]
    choice = "auto" if strict else "required"
    calls = tool_use_of(
        parse_struct(
            msgspec.json.encode({"messages": HELLO, "tools": tools, "tool_choice": choice}),
            ChatCompletionRequest,
            UNSUPPORTED,
        )
    )
    assert calls.tools == tools
    plain = {"type": "object", "properties": {"title": {"type": "string"}}}
    assert [held.schema for held in calls.held] == [plain] * 40
    body = {"tools": tools, "tool_choice": choice, "messages": HELLO}
    small = settings_of(PLAIN, "qwen25")
    tags = tag_of(chat(tokenizer, small, CALL_TEXT, **body, max_tokens=10))["tags"]
    assert len(tags) == 40
    small.templates.close()


def test_parallel_calls_can_be_refused(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    found = chat(tokenizer, qwen, OUTPUT, **TOOLS, parallel_tool_calls=False, max_tokens=10)
    assert len(found.choice["message"]["tool_calls"]) == 1


def test_special_tokens_are_shown_where_calls_begin_with_them(tokenizer: Tokenizer) -> None:
    settings = settings_of(PLAIN, "llama3")
    assert not chat(tokenizer, settings, **TOOLS).params.skip_special_tokens
    assert chat(tokenizer, settings).params.skip_special_tokens
    text = '{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {}}'
    message = chat(tokenizer, settings, text, **TOOLS).choice["message"]
    assert len(message["tool_calls"]) == 2
    settings.templates.close()


def test_ids_of_calls_are_as_templates_want_them(tokenizer: Tokenizer) -> None:
    settings = settings_of(PLAIN, "mistral")
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "weather"}]'
    ids = [
        c["id"] for c in chat(tokenizer, settings, text, **TOOLS).choice["message"]["tool_calls"]
    ]
    assert [len(call_id) for call_id in ids] == [9, 9]
    assert len({*ids}) == 2
    settings.templates.close()


def test_an_answer_can_be_sent_back_as_it_came(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    for output in ("<think>only thought", CALL_TEXT, "Hi"):
        message = chat(tokenizer, qwen, output, tools=[SMALL]).choice["message"]
        found = chat(tokenizer, qwen, messages=[*HELLO, message, *HELLO])
        assert found.choice["finish_reason"] == "stop"


def test_reasoning_that_the_prompt_begins(tokenizer: Tokenizer) -> None:
    settings = settings_of(DEEPSEEK, "qwen25", "qwen3")
    message = chat(tokenizer, settings, "why\n</think>\n\nso").choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    ids = tokenizer.encode("x<think>\n")
    message = chat(tokenizer, settings, "why</think>so", input_ids=ids).choice["message"]
    assert message["reasoning_content"] == "why"
    settings.templates.close()


# ---------------------------------------------------------------- tokens of reasoning

THOUGHT = "<think>\nLet me see é.\n</think>\n\nI say 😀."


def _reasoning_tokens(usage: dict[str, Any]) -> int:
    return usage["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("output", [THOUGHT, "<think>No end", "Hi", "<thin", " <think>a</think>"])
def test_reasoning_tokens_are_those_up_to_the_end_of_reasoning(
    tokenizer: Tokenizer, qwen: ChatSettings, output: str, size: int
) -> None:
    ids = tokenizer.encode(output, False)
    texts = [tokenizer.decode(ids[:count], False) for count in range(len(ids) + 1)]
    ends = [count for count, text in enumerate(texts) if "</think>" in text]
    expected = min(ends, default=len(ids)) if "<think>" in output else 0
    (whole,) = chat(tokenizer, qwen, output, size).answers
    assert _reasoning_tokens(whole["usage"]) == expected
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(tokenizer, qwen, output, size, stream=True, stream_options=options).answers
    assert _reasoning_tokens(last["usage"]) == expected
    counts = [_reasoning_tokens(chunk["usage"]) for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == expected


def test_reasoning_tokens_of_samples_add_up(tokenizer: Tokenizer, qwen: ChatSettings) -> None:
    (one,) = chat(tokenizer, qwen, THOUGHT).answers
    (three,) = chat(tokenizer, qwen, THOUGHT, n=3).answers
    assert _reasoning_tokens(three["usage"]) == 3 * _reasoning_tokens(one["usage"]) > 0


def test_reasoning_that_the_prompt_begins_counts_too(tokenizer: Tokenizer) -> None:
    settings = settings_of(DEEPSEEK, "qwen25", "qwen3")
    (answer,) = chat(tokenizer, settings, "why\n</think>\n\nso").answers
    assert _reasoning_tokens(answer["usage"]) == len(tokenizer.encode("why\n</think>", False))
    settings.templates.close()


def test_without_a_reasoning_parser_nothing_is_said_of_it(
    tokenizer: Tokenizer, plain: ChatTemplates
) -> None:
    (answer,) = chat(tokenizer, plain, THOUGHT).answers
    assert "completion_tokens_details" not in answer["usage"]


# ---------------------------------------------------------------- variables of templates


def test_a_chat_s_variables_go_before_the_server_s(
    tokenizer: Tokenizer, qwen: ChatSettings
) -> None:
    off = dataclasses.replace(qwen, template_kwargs={"enable_thinking": False})
    ending = "<think>\n\n</think>\n\n"
    assert chat(tokenizer, off).prompt.endswith(ending)
    wanted = {"enable_thinking": True}
    assert not chat(tokenizer, off, chat_template_kwargs=wanted).prompt.endswith(ending)
    assert not chat(tokenizer, qwen).prompt.endswith(ending)


def test_the_flag_for_a_named_template_chooses_of_the_model_s(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "model")
    (model / "chat_templates").mkdir()
    (model / "chat_templates" / "rag.jinja").write_text("of rag")
    args = ServerArgs(model_path=str(model), hf_chat_template_name="rag")
    assert chat_settings_of(args).templates.reads("rag", has_tools=True)
    own = str(model / "chat_templates" / "rag.jinja")
    for changes in ({"hf_chat_template_name": "x"}, {"chat_template": own}):
        with pytest.raises(LaunchError, match=r"^--hf-chat-template-name: "):
            chat_settings_of(dataclasses.replace(args, **changes))


def test_the_flag_for_variables_is_a_json_object() -> None:
    def settings(text: str | None) -> ChatSettings:
        args = ServerArgs(model_path="demo", default_chat_template_kwargs=text)
        return chat_settings_of(args)

    assert settings('{"a": [1, null]}').template_kwargs == {"a": [1, None]}
    assert settings(None).template_kwargs == {}
    for text in ("[1]", "{", "nonsense", '{"messages": []}', "null", '"\ud800"'):
        with pytest.raises(LaunchError, match="--default-chat-template-kwargs"):
            settings(text)
