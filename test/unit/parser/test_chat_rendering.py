"""Rendered chats equal those of transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from chat_template_cases import CHATS, DEEPSEEK, LLAMA, PARTS, QWEN, TEMPLATES, TOOL, USER
from serving_utils import make_tokenizer
from sglang.srt.parser.chat_rendering import ChatTemplate, RenderingError

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
MAX_CHARS = 100_000


@cache
def oracle() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **TOKENS)


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, MAX_CHARS)


def expected(template: str, messages: Any, is_continued: bool = False, **variables: Any) -> str:
    return oracle().apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        continue_final_message=is_continued,
        **variables,
    )


def rendered(template: str, messages: Any, is_continued: bool = False, **variables: Any) -> str:
    given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    return compiled(template).render({**TOKENS, **given, "messages": messages}, is_continued)


def both(template: str, messages: Any, is_continued: bool = False, **variables: Any) -> None:
    """The two agree on the text, or on that there is none."""
    try:
        text = expected(template, messages, is_continued, **variables)
    except Exception:  # noqa: BLE001 - whatever it raises
        with pytest.raises(RenderingError):
            rendered(template, messages, is_continued, **variables)
        return
    assert rendered(template, messages, is_continued, **variables) == text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begins", [False, True])
def test_chats_of_every_shape(name: str, begins: bool) -> None:
    for messages in CHATS.values():
        for tools in (None, [TOOL], [TOOL, TOOL]):
            both(TEMPLATES[name], messages, tools=tools, add_generation_prompt=begins)


@pytest.mark.parametrize("thinks", [False, True, None, "no"])
def test_variables_of_the_client(thinks: Any) -> None:
    both(QWEN, CHATS["turns"], add_generation_prompt=True, enable_thinking=thinks)
    both(LLAMA, CHATS["turns"], date_string="1 Jan", tools_in_user_message=False, tools=[TOOL])
    both(LLAMA, CHATS["one"], bos_token="other", custom_tools=[TOOL])


@pytest.mark.parametrize(
    "name", sorted(TEMPLATES.keys() - {"extensions"})
)  # it shows messages twice
@pytest.mark.parametrize("text", ["It is  ", "It", " a\n", "x" * 50, "é 😀"])
def test_continued_messages_end_where_their_text_ends(name: str, text: str) -> None:
    chat = [USER, {"role": "assistant", "content": text}]
    both(TEMPLATES[name], chat, is_continued=True)


TEXTS = st.text(max_size=20) | st.sampled_from(["</think>x", "<r>a</r>", "{{ 1 }}", "{% x %}"])
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "other"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": TEXTS},
        optional={"reasoning_content": TEXTS, "name": TEXTS, "tool_call_id": TEXTS},
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", ["llama", "qwen", "mistral", "deepseek", "extensions"])
@given(messages=MESSAGES, has_tools=st.booleans(), begins=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_messages(name: str, messages: Any, has_tools: bool, begins: bool) -> None:
    tools = [TOOL] if has_tools else None
    both(TEMPLATES[name], messages, tools=tools, add_generation_prompt=begins)


PART_CHAT = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]


def test_text_parts_go_to_templates_that_read_them_and_are_joined_for_others() -> None:
    assert rendered(PARTS, PART_CHAT) == expected(PARTS, PART_CHAT) == "[a][b]"
    joined = [{"role": "user", "content": "a b"}]
    for template in (QWEN, DEEPSEEK, LLAMA):
        assert rendered(template, PART_CHAT) == expected(template, joined)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('said by the template') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages | attr('__class__') }}{{ messages.nothing.at_all }}",
        "{{ 'a' * 200000 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_may_not_do_is_an_error(source: str) -> None:
    with pytest.raises(RenderingError):
        rendered(source, [USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "{% include 'x' %}{% endif %}"])
def test_broken_templates_say_where(source: str) -> None:
    with pytest.raises(RenderingError, match=r"cannot be compiled: line 1: "):
        ChatTemplate(source, MAX_CHARS)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("begins", [False, True])
def test_the_turn_is_the_end_of_the_prompt_without_what_others_say(
    name: str, chat: str, begins: bool
) -> None:
    messages = CHATS[chat]
    given = {**TOKENS, "tools": None, "add_generation_prompt": begins}
    is_continued = chat == "continued" and not begins
    template = compiled(TEMPLATES[name])
    try:
        prompt = template.render({**given, "messages": messages}, is_continued)
    except RenderingError:
        with pytest.raises(RenderingError):
            template.render_turn({**given, "messages": messages}, is_continued)
        return
    turn = template.render_turn({**given, "messages": messages}, is_continued)
    assert prompt.endswith(turn)
    assert (messages[-1]["content"].strip() in turn) == is_continued
    if begins and name in ("llama", "qwen", "deepseek"):
        assert "ssistant" in turn
