"""The checks of litellm: its functions over a server of the scripted model."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import _run_checks
import litellm
from _run_checks import raises
from pydantic import BaseModel

from scripted_model import TEXTS, TOOLS, messages_of, trigger

MODEL = "hosted_vllm/scripted"  # any server with OpenAI's API
LONG = [{"role": "user", "content": "a b " * 3000}]


class Person(BaseModel):
    name: str
    age: int


class Checks:
    """Each method is a check."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._settings: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
        self._settings |= {"num_retries": 0, "temperature": 0, "max_tokens": 200}

    def _complete(self, text: str = "answer", **fields: Any) -> Any:
        call = {"model": MODEL, "messages": messages_of(text), **self._settings, **fields}
        return litellm.completion(**call)

    def chat_with_usage(self) -> None:
        answer = self._complete()
        assert answer.choices[0].message.content == TEXTS["answer"]
        usage = answer.usage
        assert usage.completion_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert answer.choices[0].finish_reason == "stop"

    def chat_as_an_openai_model(self) -> None:
        answer = self._complete(model="openai/scripted")
        assert answer.choices[0].message.content == TEXTS["answer"]

    def chat_streamed(self) -> None:
        chunks = list(self._complete(stream=True, stream_options={"include_usage": True}))
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == TEXTS["answer"]
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == TEXTS["answer"]
        assert whole.usage.completion_tokens == self._complete().usage.completion_tokens

    def chat_asynchronous(self) -> None:
        async def ask() -> list[Any]:
            call = {"model": MODEL, "messages": messages_of("answer"), **self._settings}
            return await asyncio.gather(*[litellm.acompletion(**call) for _ in range(8)])

        found = {answer.choices[0].message.content for answer in asyncio.run(ask())}
        assert found == {TEXTS["answer"]}

    def chat_asynchronous_and_streamed(self) -> None:
        async def ask() -> str:
            call = {"model": MODEL, "messages": messages_of("emoji"), **self._settings}
            chunks = await litellm.acompletion(**call, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        assert asyncio.run(ask()) == TEXTS["emoji"]

    def tools_called_and_their_results(self) -> None:
        message = self._complete("hermes_two", tools=TOOLS).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert [name for name, _ in calls] == ["get_weather", "get_time"]
        assert json.loads(calls[0][1]) == {"city": "Paris"}
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": trigger("answer")}
            for call in message.tool_calls
        ]
        messages = [*messages_of("hermes_two"), message, *results]
        assert self._complete(messages=messages, tools=TOOLS).choices[0].message.content

    def tools_called_in_a_stream(self) -> None:
        chunks = list(self._complete("hermes_two", tools=TOOLS, stream=True))
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        names = [call.function.name for call in message.tool_calls]
        assert names == ["get_weather", "get_time"]
        assert json.loads(message.tool_calls[1].function.arguments) == {"zone": "CET"}

    def tools_one_that_must_be_called(self) -> None:
        choice = {"type": "function", "function": {"name": "get_time"}}
        answer = self._complete("answer", tools=TOOLS, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_time"

    def response_format_of_a_class(self) -> None:
        answer = self._complete("json", response_format=Person).choices[0].message.content
        assert Person.model_validate_json(answer) == Person(name="Ada", age=36)

    def response_format_json_object(self) -> None:
        answer = self._complete("json", response_format={"type": "json_object"})
        assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "age": 36}

    def reasoning(self) -> None:
        message = self._complete("think").choices[0].message
        assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")

    def text_completion(self) -> None:
        prompt = f"<|user|>{trigger('answer')}<|assistant|>"
        call = {**self._settings, "model": "text-completion-openai/scripted", "prompt": prompt}
        assert litellm.text_completion(**call).choices[0].text == TEXTS["answer"]

    def logprobs(self) -> None:
        answer = self._complete(logprobs=True, top_logprobs=2).choices[0].logprobs
        assert all(len(entry.top_logprobs) == 2 for entry in answer.content)

    def a_prompt_that_is_too_long(self) -> None:
        for streams in (False, True):
            call = functools.partial(self._complete, messages=LONG, stream=streams)
            raises(litellm.ContextWindowExceededError, call)

    def a_value_that_is_refused(self) -> None:
        error = raises(litellm.BadRequestError, lambda: self._complete(temperature=-1))
        assert "temperature" in str(error)

    def a_base_url_without_v1(self) -> None:
        error = raises(litellm.NotFoundError, lambda: self._complete(api_base=self._url))
        assert "/v1/chat/completions" in str(error)


if __name__ == "__main__":
    _run_checks.main(__doc__, Checks)
