"""The checks of the `openai` package, over a server of the bundled model."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any, Literal

import _run_checks
import openai
from _example_chats import NAME, TOOLS, calling_chat
from _run_checks import raises

MESSAGES = [{"role": "user", "content": "Read the lines of a file."}]
PROMPT = "def read_lines(path):\n"
LONG = "a b " * 30_000
PATH = "notes.txt"
CALLING_CHAT = calling_chat(PATH)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


class Checks:
    """Each method is a check."""

    def __init__(self, url: str) -> None:
        self._url, self._base_url = url, f"{url}/v1"
        self._client = openai.OpenAI(base_url=self._base_url, api_key="none", max_retries=0)
        self._model = self._client.models.list().data[0].id

    def _chat(self, **fields: Any) -> Any:
        fields = {"messages": MESSAGES, "model": self._model, **GREEDY, **fields}
        return self._client.chat.completions.create(**fields)

    def _complete(self, **fields: Any) -> Any:
        fields = {"prompt": PROMPT, "model": self._model, **GREEDY, **fields}
        return self._client.completions.create(**fields)

    def models(self) -> None:
        model = self._client.models.retrieve(self._model)
        assert model.id == self._model
        assert model.object == "model"

    def completion(self) -> None:
        answer = self._complete()
        assert answer.choices[0].text
        usage = answer.usage
        assert usage.completion_tokens == 16
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    def completion_of_token_ids_echoed(self) -> None:
        """Two prompts as ids of one text: each echo is that text, with a value for each token."""
        known = self._chat(extra_body={"return_token_ids": True}).choices[0].response_token_ids
        answer = self._complete(prompt=[known, known], echo=True, logprobs=2, max_tokens=2)
        first, second = answer.choices
        assert first.text == second.text
        assert (first.index, second.index) == (0, 1)
        assert len(first.logprobs.token_logprobs) == len(known) + 2
        assert first.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in first.logprobs.token_logprobs[1:])
        assert "".join(first.logprobs.tokens) == first.text

    def completion_streamed(self) -> None:
        whole = self._complete(logprobs=1)
        chunks = list(self._complete(logprobs=1, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
        assert tokens == whole.choices[0].logprobs.tokens
        assert chunks[-1].choices[0].finish_reason == "length"

    def chat(self) -> None:
        answer = self._chat(n=2, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        message = answer.choices[0].message
        assert message.role == "assistant"
        assert message.content
        assert message.reasoning_content is None
        assert answer.choices[0].finish_reason in ("stop", "length")
        self._chat(messages=[*MESSAGES, message, *MESSAGES])  # as it came

    def chat_streamed(self) -> None:
        whole = self._chat().choices[0].message.content
        chunks = list(self._chat(stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(parts) == whole
        assert chunks[-1].usage.completion_tokens > 0
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")

    def chat_gathered_by_the_package(self) -> None:
        """With a stop string: for an answer that is cut at its length the package raises."""
        stop = self._chat().choices[0].message.content[5:9]
        whole = self._chat(tools=TOOLS, stop=stop).choices[0]
        call = {"messages": MESSAGES, "model": self._model, **GREEDY, "tools": TOOLS, "stop": stop}
        with self._client.chat.completions.stream(**call) as events:
            kinds = {event.type for event in events}
            found = events.get_final_completion().choices[0]
        assert {"chunk", "content.delta"} <= kinds
        assert found.message.content == whole.message.content
        assert found.finish_reason == whole.finish_reason == "stop"

    def chat_asynchronous(self) -> None:
        """Eight chats at once say what one says."""
        asyncio.run(self._asynchronous())

    async def _asynchronous(self) -> None:
        whole = self._chat().choices[0].message.content
        settings = {"base_url": self._base_url, "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**settings) as client:
            call = {"messages": MESSAGES, "model": self._model, **GREEDY}
            calls = [client.chat.completions.create(**call) for _ in range(8)]
            answers = await asyncio.gather(*calls)
        assert {answer.choices[0].message.content for answer in answers} == {whole}

    def chat_fields_of_SGLang(self) -> None:
        fields = {"ignore_eos": True, "min_p": 0.1, "top_k": 1, "return_token_ids": True}
        choice = self._chat(extra_body=fields).choices[0]
        assert len(choice.response_token_ids) == 16
        assert choice.prompt_token_ids

    def chat_raw_response(self) -> None:
        raw = self._client.chat.completions.with_raw_response
        answer = raw.create(messages=MESSAGES, model=self._model, **GREEDY)
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.parse().choices[0].message.content

    def logprobs(self) -> None:
        content = self._chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        assert all(entry.logprob <= 0 for entry in content)

    def response_format(self) -> None:
        lines = {"type": "integer", "minimum": 0, "maximum": 999}
        schema = {"type": "object", "properties": {"lines": lines}, "required": ["lines"]}
        wanted = {"name": "file", "schema": schema | {"additionalProperties": False}}
        form = {"type": "json_schema", "json_schema": wanted}
        choice = self._chat(response_format=form, max_tokens=200).choices[0]
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"lines"}
        choice = self._chat(response_format={"type": "json_object"}).choices[0]
        assert choice.message.content.startswith("{")

    def response_format_parsed(self) -> None:
        """The package makes the schema of a class, and an object of it of the answer."""
        from pydantic import BaseModel  # comes with the package

        class File(BaseModel):
            path: Literal["a.txt", "b.txt"]
            is_new: bool | None

        answer = self._client.chat.completions.parse(
            messages=MESSAGES, model=self._model, temperature=0, response_format=File
        )
        assert isinstance(answer.choices[0].message.parsed, File)

    def tools_unused(self) -> None:
        """Checks that text that is no call is given as content, and is no error."""
        for choice in ("auto", "none", "required"):
            answer = self._chat(tools=TOOLS, tool_choice=choice)
            message = answer.choices[0].message
            assert message.content or message.tool_calls
        list(self._chat(tools=TOOLS, stream=True))

    def tools_called(self) -> None:
        """A call comes, and goes back with what the tool said."""
        first = self._chat(**CALLING_CHAT).choices[0]
        (call,) = first.message.tool_calls
        assert (call.type, call.function.name) == ("function", NAME)
        assert json.loads(call.function.arguments) == {"path": PATH}
        assert first.finish_reason == "tool_calls"
        said = {"role": "tool", "tool_call_id": call.id, "content": "Nothing is in it."}
        required = {"type": "function", "function": {"name": NAME}}
        chat = [*CALLING_CHAT["messages"], first.message, said, *CALLING_CHAT["messages"]]
        answer = self._chat(**{**CALLING_CHAT, "messages": chat, "tool_choice": required})
        message = answer.choices[0].message
        assert message.content or message.tool_calls

    def tools_called_in_a_stream(self) -> None:
        call = {"model": self._model, **CALLING_CHAT}
        with self._client.chat.completions.stream(**call) as events:
            found = events.get_final_completion().choices[0]
        (call_found,) = found.message.tool_calls
        assert call_found.function.name == NAME
        assert json.loads(call_found.function.arguments) == {"path": PATH}
        assert call_found.id
        assert found.finish_reason == "tool_calls"

    def errors(self) -> None:
        self._is_refused("temperature", temperature=-1)
        try:
            self._client.models.retrieve("nothing")
        except openai.NotFoundError:
            return
        raise AssertionError("a model that does not exist was found")

    def errors_at_the_start_of_a_stream(self) -> None:
        self._is_refused("temperature", stream=True, temperature=-1)
        schema = {"name": "x", "schema": {"uniqueItems": True}}
        wanted = {"type": "json_schema", "json_schema": schema}
        self._is_refused("response_format", stream=True, response_format=wanted)

    def another_model(self) -> None:
        """The one that is served answers, as with SGLang."""
        assert self._chat(model="another").model == self._model

    def a_prompt_that_is_too_long(self) -> None:
        long = [{"role": "user", "content": LONG}]
        for call in (
            functools.partial(self._chat, messages=long),
            functools.partial(self._chat, messages=long, stream=True),
            functools.partial(self._complete, prompt=LONG),
        ):
            assert raises(openai.BadRequestError, call).code == "context_length_exceeded"

    def a_base_url_without_v1(self) -> None:
        client = openai.OpenAI(base_url=self._url, api_key="none", max_retries=0)
        chats = client.chat.completions
        call = functools.partial(chats.create, messages=MESSAGES, model=self._model)
        assert "/v1/chat/completions" in str(raises(openai.NotFoundError, call))

    def id_of_a_request(self) -> None:
        assert self._chat(extra_headers={"x-request-id": "job-1"})._request_id == "job-1"
        assert self._chat()._request_id

    def _is_refused(self, field: str, **fields: Any) -> None:
        try:
            self._chat(**fields)
        except openai.BadRequestError as error:
            found = (error.param, bool(error.body["message"]))
        else:
            found = (None, False)
        assert found == (field, True)


if __name__ == "__main__":
    _run_checks.main(__doc__, Checks)
