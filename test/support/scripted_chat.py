"""Chats against a scripted scheduler: the request that each becomes, and its answer or chunks."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from fake_backend import Backend, run
from sglang.srt.entrypoints.openai.chat_protocol import UNSUPPORTED, ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.entrypoints.openai.serving_chat import ChatCompletion
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import RequestError
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.messages.requests import (
    BatchStrOutput,
    FinishReason,
    PositionLogprobs,
    ReqTextOutput,
)
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS
from sglang.srt.parser.template_files import TemplateFiles
from sglang.srt.tokenizer import Tokenizer

STOP = FinishReason(type="stop", matched="<eos>")
HELLO = [{"role": "user", "content": "hello"}]


def settings_of(template: str, calls: str, reasoning: str | None = None) -> ChatSettings:
    form = None if reasoning is None else REASONING_FORMATS[reasoning]
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    files = TemplateFiles({"default": template}, tokens)
    return ChatSettings(ChatTemplates(files), CALL_FORMATS[calls], form)


class Chat:
    """A chat, the request that it became, and its answer or chunks."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.prompt = ""
        self.params: Any = None

    @property
    def choice(self) -> dict[str, Any]:
        (answer,) = self.answers
        (choice,) = answer["choices"]
        return choice

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [a["choices"][0]["delta"] for a in self.answers if a["choices"]]

    def joined(self, part: str) -> str:
        return "".join(delta.get(part) or "" for delta in self.deltas)


def call_of(backend: Backend, settings: ChatSettings, body: dict[str, Any]) -> ChatCompletion:
    raw = msgspec.json.encode({"messages": HELLO, **body})
    request = parse_struct(raw, ChatCompletionRequest, UNSUPPORTED)
    return ChatCompletion(backend.manager, settings, request, "model")


def chat(
    tokenizer: Tokenizer,
    settings: ChatSettings | ChatTemplates,
    output: str = "Hi",
    size: int = 1000,
    **body: Any,
) -> Chat:
    """A chat whose output comes `size` tokens at a time."""
    if isinstance(settings, ChatTemplates):
        settings = ChatSettings(settings)
    found = Chat()

    async def scenario(backend: Backend) -> None:
        call = call_of(backend, settings, body)
        outputs = call.chunks() if call.streams else call.answer()

        async def read() -> None:
            async with aclosing(outputs):
                found.answers = [item async for item in outputs]

        reading = asyncio.create_task(read())
        while not backend.requests and not reading.done():
            await asyncio.sleep(0.001)
        if not backend.requests:
            return await reading
        num_samples = backend.requests[0].sampling_params.n
        await backend.wait_sent(num_samples)
        for request in backend.requests:
            found.prompt = tokenizer.decode(request.input_ids, False)
            found.params = request.sampling_params
            stream = tokenizer.decode_stream(True, request.input_ids)
            ids = tokenizer.encode(output, False)
            for start in range(0, len(ids), size):
                new = ids[start : start + size]
                is_last = start + size >= len(ids)
                reason = STOP if is_last else None
                end = start + len(new)
                news = ReqTextOutput(request.req_id, stream.push(new), new, reason, 3, end, 0, 0)
                if request.logprobs is not None:
                    news.output_logprobs = [PositionLogprobs(i, -0.5, [-0.5], [i]) for i in new]
                backend.inbox.put_nowait(BatchStrOutput(outputs=[news]))
                await asyncio.sleep(0.002)
        await reading

    run(tokenizer, scenario)
    return found


def refused(tokenizer: Tokenizer, settings: Any, field: str, match: str = ".", **body: Any) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        chat(tokenizer, settings, **body)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
