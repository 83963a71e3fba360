"""A tokenizer with more tokens than the model: one warning at the start, and a text with such a
token is refused with the reason."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from fake_backend import Backend, answer_of, run
from serving_utils import VOCAB_SIZE
from sglang.srt.entrypoints.launch import check_model
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import ChatCompletion
from sglang.srt.entrypoints.openai.serving_completions import Completion
from sglang.srt.frontend.errors import RequestError
from sglang.srt.model_config import resolve_model_path
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.template_files import TemplateFiles
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(resolve_model_path("demo"))
WORD = "Returns"
(WORD_ID,) = TOKENIZER.encode(WORD, add_special_tokens=False)
assert WORD_ID >= VOCAB_SIZE, "The scripted model has it."


async def generate(backend: Backend, text: str) -> None:
    await answer_of(backend, text=text)


async def generate_batch(backend: Backend, text: str) -> None:
    await answer_of(backend, text=["a", text])


async def complete(backend: Backend, text: str) -> None:
    body = CompletionRequest(prompt=text, max_tokens=2)
    async with aclosing(Completion(backend.manager, body, "model").answer()) as answers:
        await anext(answers)


async def complete_batch(backend: Backend, text: str) -> None:
    body = CompletionRequest(prompt=["a", text], max_tokens=2)
    async with aclosing(Completion(backend.manager, body, "model").answer()) as answers:
        await anext(answers)


async def chat(backend: Backend, text: str) -> None:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": text}])
    templates = ChatTemplates(TemplateFiles({"default": "{{ messages[0].content }}"}))
    try:
        settings = ChatSettings(templates)
        call = ChatCompletion(backend.manager, settings, body, "model")
        async with aclosing(call.answer()) as answers:
            await anext(answers)
    finally:
        templates.close()


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (generate, "text"),
        (generate_batch, "text[1]"),
        (complete, "prompt[0]"),
        (complete_batch, "prompt[1]"),
        (chat, "messages"),
    ],
)
def test_a_text_with_a_token_that_the_model_lacks_is_refused_with_the_reason(
    ask: Callable[[Backend, str], Awaitable[None]], field: str
) -> None:
    async def scenario(backend: Backend) -> None:
        with pytest.raises(RequestError) as caught:
            await ask(backend, WORD)
        message = caught.value.message
        assert caught.value.field == field
        assert caught.value.status_code == 400
        assert message.startswith(f"{field}: ")
        assert repr(WORD) in message
        assert str(WORD_ID) in message
        assert f"vocab_size {VOCAB_SIZE}" in message
        assert "--tokenizer-path" in message

    run(TOKENIZER, scenario)


@pytest.mark.parametrize("num_missing", [0, 1, 96])
def test_the_start_warns_once_of_tokens_that_the_model_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_missing: int
) -> None:
    demo = resolve_model_path("demo")
    shutil.copy(demo / "tokenizer.json", tmp_path)
    config: dict[str, Any] = json.loads((demo / "config.json").read_text())
    vocab_size = config["vocab_size"] - num_missing
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    with caplog.at_level(logging.WARNING):
        check_model(ServerArgs(model_path=str(tmp_path)))
    assert len(caplog.messages) == (num_missing > 0)
    for message in caplog.messages:
        assert f" {num_missing} " in message
        assert f"vocab_size {vocab_size}" in message
        first = next(text for text, it in TOKENIZER.vocabulary().items() if it == vocab_size)
        assert repr(first) in message
        assert "\n" not in message
