"""The checks of instructor: its modes over a server of the scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import _run_checks
import instructor
import openai
from _run_checks import raises
from pydantic import BaseModel

from scripted_model import messages_of


class Person(BaseModel):
    name: str
    age: int


class get_weather(BaseModel):
    """Weather of a city"""

    city: str


class get_time(BaseModel):
    """Time of a zone"""

    zone: str


class Checks:
    """Each method is a check."""

    def __init__(self, url: str) -> None:
        self._settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
        self._settings |= {"max_retries": 0}
        call: dict[str, Any] = {"model": "scripted", "temperature": 0, "max_tokens": 200}
        call |= {"max_retries": 0}
        self._person = {"response_model": Person, "messages": messages_of("json"), **call}
        self._weather = {"response_model": get_weather, "messages": messages_of("hermes"), **call}

    def _client_of(self, mode: instructor.Mode) -> Any:
        return instructor.from_openai(openai.OpenAI(**self._settings), mode=mode)

    def _is_ada(self, found: Any) -> bool:
        return isinstance(found, Person) and (found.name, found.age) == ("Ada", 36)

    def a_class_by_a_schema(self) -> None:
        assert self._is_ada(self._client_of(instructor.Mode.JSON_SCHEMA).create(**self._person))

    def a_class_by_a_tool_strict_or_not(self) -> None:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
            found = self._client_of(mode).create(**self._weather)
            assert isinstance(found, get_weather)
            assert found.city == "Paris"

    def a_class_and_the_usage(self) -> None:
        client = self._client_of(instructor.Mode.JSON_SCHEMA)
        found, raw = client.create_with_completion(**self._person)
        assert self._is_ada(found)
        assert raw.usage.completion_tokens > 0

    def a_class_in_parts(self) -> None:
        client = self._client_of(instructor.Mode.JSON_SCHEMA)
        parts = list(client.create_partial(**self._person))
        assert len(parts) > 1
        assert (parts[-1].name, parts[-1].age) == ("Ada", 36)

    def a_class_in_parts_by_a_tool(self) -> None:
        client = self._client_of(instructor.Mode.TOOLS)
        assert list(client.create_partial(**self._weather))[-1].city == "Paris"

    def several_classes(self) -> None:
        """Calls of two tools in one answer."""
        several = {"response_model": Iterable[get_weather | get_time]}
        several["messages"] = messages_of("hermes_two")
        client = self._client_of(instructor.Mode.PARALLEL_TOOLS)
        found = list(client.create(**{**self._weather, **several}))
        assert [each.model_dump() for each in found] == [{"city": "Paris"}, {"zone": "CET"}]

    def asynchronous(self) -> None:
        async def ask() -> list[Any]:
            made = openai.AsyncOpenAI(**self._settings)
            client = instructor.from_openai(made, mode=instructor.Mode.JSON_SCHEMA)
            return await asyncio.gather(*[client.create(**self._person) for _ in range(8)])

        assert all(map(self._is_ada, asyncio.run(ask())))

    def by_the_name_of_a_provider(self) -> None:
        server = {name: self._settings[name] for name in ("base_url", "api_key")}
        mode = instructor.Mode.TOOLS
        client = instructor.from_provider("openai/scripted", mode=mode, **server)
        fields = {name: value for name, value in self._weather.items() if name != "model"}
        assert client.create(**fields).city == "Paris"

    def _refused(self, **fields: Any) -> str:
        client = self._client_of(instructor.Mode.JSON_SCHEMA)
        return str(raises(Exception, lambda: client.create(**{**self._person, **fields})))

    def a_prompt_that_is_too_long(self) -> None:
        long = [{"role": "user", "content": "a b " * 3000}]
        assert "context_length_exceeded" in self._refused(messages=long)

    def a_value_that_is_refused(self) -> None:
        assert "temperature" in self._refused(temperature=-1)


if __name__ == "__main__":
    _run_checks.main(__doc__, Checks)
