"""The checks of pydantic-ai: agents over a server of the scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import _run_checks
from _run_checks import raises
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from scripted_model import TEXTS, trigger

# Else what a user writes is no special token, and those bring the scripted texts out.
KEEPS_TRIGGERS = {"may_tokenize_special_tokens_in_content": False}


class Person(BaseModel):
    name: str
    age: int


class Checks:
    """Each method is a check."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _model_at(self, base_url: str) -> OpenAIChatModel:
        provider = OpenAIProvider(base_url=base_url, api_key="none")
        return OpenAIChatModel("scripted", provider=provider, profile=KEEPS_TRIGGERS)

    def _agent_of(self, **options: Any) -> Agent[None, Any]:
        settings = {"temperature": 0.0, "max_tokens": 200}
        return Agent(self._model_at(f"{self._url}/v1"), model_settings=settings, **options)

    def chat_with_usage(self) -> None:
        result = self._agent_of().run_sync(trigger("answer"))
        assert result.output == TEXTS["answer"]
        assert result.usage.input_tokens > 0
        assert result.usage.output_tokens > 0

    def chat_with_instructions(self) -> None:
        result = self._agent_of(instructions="Be brief.").run_sync(trigger("answer"))
        assert result.output == TEXTS["answer"]

    def chat_streamed(self) -> None:
        async def ask() -> list[str]:
            async with self._agent_of().run_stream(trigger("answer")) as answer:
                return [part async for part in answer.stream_text(delta=True)]

        assert "".join(asyncio.run(ask())) == TEXTS["answer"]

    def chats_at_once(self) -> None:
        async def ask() -> list[Any]:
            agent = self._agent_of()
            return await asyncio.gather(*[agent.run(trigger("answer")) for _ in range(8)])

        assert {result.output for result in asyncio.run(ask())} == {TEXTS["answer"]}

    def tools(self) -> None:
        """The agent calls the function, sends what it returns, and gets the answer."""
        asked = []
        agent = self._agent_of()

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Weather of a city"""
            asked.append(city)
            return trigger("answer")

        assert agent.run_sync(trigger("hermes")).output == TEXTS["answer"]
        assert asked == ["Paris"]

    def tools_streamed(self) -> None:
        asked = []
        agent = self._agent_of()

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Weather of a city"""
            asked.append(city)
            return trigger("answer")

        async def ask() -> str:
            async with agent.run_stream(trigger("hermes")) as answer:
                return str(await answer.get_output())

        assert asyncio.run(ask()) == TEXTS["answer"]
        assert asked == ["Paris"]

    def _output_of(self, kind: Any) -> Any:
        return self._agent_of(output_type=kind).run_sync(trigger("json")).output

    def output_by_a_schema(self) -> None:
        assert self._output_of(NativeOutput(Person)) == Person(name="Ada", age=36)

    def output_by_a_prompt(self) -> None:
        assert self._output_of(PromptedOutput(Person, template=False)) == Person(name="Ada", age=36)

    def output_by_a_tool(self) -> None:
        assert isinstance(self._output_of(ToolOutput(Person)), Person)

    def output_streamed(self) -> None:
        async def ask() -> Person:
            agent = self._agent_of(output_type=NativeOutput(Person))
            async with agent.run_stream(trigger("json")) as answer:
                return await answer.get_output()

        assert asyncio.run(ask()) == Person(name="Ada", age=36)

    def reasoning_and_back(self) -> None:
        result = self._agent_of().run_sync(trigger("think"))
        thinking = [part.content for part in result.response.parts if part.part_kind == "thinking"]
        assert (thinking, result.output) == (["Two and two."], "Four.")
        again = self._agent_of().run_sync(trigger("answer"), message_history=result.all_messages())
        assert again.output == TEXTS["answer"]

    def a_prompt_that_is_too_long(self) -> None:
        error = raises(ModelHTTPError, lambda: self._agent_of().run_sync("a b " * 3000))
        assert type(error).__name__ == "ModelContextWindowExceededError"

    def a_value_that_is_refused(self) -> None:
        agent, settings = self._agent_of(), {"temperature": -1.0}
        error = raises(ModelHTTPError, lambda: agent.run_sync("a", model_settings=settings))
        assert "temperature" in str(error)

    def a_base_url_without_v1(self) -> None:
        error = raises(ModelHTTPError, lambda: Agent(self._model_at(self._url)).run_sync("a"))
        assert "/v1/chat/completions" in str(error)


if __name__ == "__main__":
    _run_checks.main(__doc__, Checks)
