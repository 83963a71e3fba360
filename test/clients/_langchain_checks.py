"""The checks of langchain-openai: `ChatOpenAI` and `OpenAI` over a server of the scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import _run_checks
import openai
from _run_checks import raises
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from scripted_model import TEXTS, trigger


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    return trigger("answer")


@tool
def get_time(zone: str) -> str:
    """Time of a zone"""
    return zone


class Checks:
    """Each method is a check."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
        self._settings |= {"max_retries": 0, "model": "scripted"}
        self._settings |= {"temperature": 0, "max_tokens": 200}
        self._model = ChatOpenAI(**self._settings)
        self._with_tools = self._model.bind_tools([get_weather, get_time])

    def chat_with_usage(self) -> None:
        answer = self._model.invoke(trigger("answer"))
        assert answer.content == TEXTS["answer"]
        usage = answer.usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
        assert answer.response_metadata["finish_reason"] == "stop"

    def chat_streamed_with_usage(self) -> None:
        whole = AIMessageChunk(content="")
        for chunk in ChatOpenAI(**self._settings, stream_usage=True).stream(trigger("answer")):
            whole += chunk
        assert whole.content == TEXTS["answer"]
        assert whole.usage_metadata["output_tokens"] > 0

    def chats_of_a_batch(self) -> None:
        texts = ["answer", "emoji", "code"]
        answers = self._model.batch([trigger(name) for name in texts])
        assert [answer.content for answer in answers] == [TEXTS[name] for name in texts]

    def chat_asynchronous(self) -> None:
        async def ask() -> tuple[str, str]:
            parts = [part.content async for part in self._model.astream(trigger("answer"))]
            return (await self._model.ainvoke(trigger("answer"))).content, "".join(parts)

        assert asyncio.run(ask()) == (TEXTS["answer"], TEXTS["answer"])

    def tools_called_and_their_results(self) -> None:
        """A call comes, its result goes back, and the answer to that comes."""
        question = HumanMessage(trigger("hermes"))
        answer = self._with_tools.invoke([question])
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert self._with_tools.invoke([question, answer, result]).content == TEXTS["answer"]

    def tools_called_in_a_stream(self) -> None:
        whole = AIMessageChunk(content="")
        for chunk in self._with_tools.stream(trigger("hermes_two")):
            whole += chunk
        calls = [(call["name"], call["args"]) for call in whole.tool_calls]
        assert calls == [("get_weather", {"city": "Paris"}), ("get_time", {"zone": "CET"})]

    def tools_one_that_must_be_called(self) -> None:
        forced = self._model.bind_tools([get_weather, get_time], tool_choice="get_time")
        assert [call["name"] for call in forced.invoke("a").tool_calls] == ["get_time"]

    def structured_output_by_json(self) -> None:
        for method in ("json_schema", "json_mode"):
            structured = self._model.with_structured_output(Person, method=method)
            assert structured.invoke(trigger("json")) == Person(name="Ada", age=36)

    def structured_output_by_a_function(self) -> None:
        structured = self._model.with_structured_output(Person, method="function_calling")
        assert isinstance(structured.invoke(trigger("json")), Person)

    def structured_output_strict(self) -> None:
        structured = self._model.with_structured_output(Person, strict=True, include_raw=True)
        assert structured.invoke(trigger("json"))["parsed"] == Person(name="Ada", age=36)

    def completion(self) -> None:
        prompt = f"<|user|>{trigger('answer')}<|assistant|>"
        text = OpenAI(**self._settings)
        assert text.invoke(prompt) == TEXTS["answer"]
        assert "".join(text.stream(prompt)) == TEXTS["answer"]

    def logprobs(self) -> None:
        answer = self._model.bind(logprobs=True, top_logprobs=2).invoke(trigger("answer"))
        assert answer.response_metadata["logprobs"]["content"]

    def id_of_a_request(self) -> None:
        named = ChatOpenAI(**self._settings, include_response_headers=True)
        headers = {"x-request-id": "job-1"}
        answer = named.invoke(trigger("answer"), extra_headers=headers)
        assert answer.response_metadata["headers"]["x-request-id"] == "job-1"

    def a_prompt_that_is_too_long(self) -> None:
        raises(ContextOverflowError, lambda: self._model.invoke("a b " * 3000))
        raises(ContextOverflowError, lambda: list(self._model.stream("a b " * 3000)))

    def a_value_that_is_refused(self) -> None:
        error = raises(
            openai.BadRequestError, lambda: self._model.invoke("a", extra_body={"top_k": "many"})
        )
        assert "top_k" in str(error)

    def a_base_url_without_v1(self) -> None:
        lost = ChatOpenAI(**{**self._settings, "base_url": self._url})
        error = raises(openai.NotFoundError, lambda: lost.invoke("a"))
        assert "/v1/chat/completions" in str(error)


if __name__ == "__main__":
    _run_checks.main(__doc__, Checks)
