"""`/v1/chat/completions` over the tokenizer manager."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.chat_messages import messages_of, tool_use_of
from sglang.srt.entrypoints.openai.chat_parts import ChoiceParts, Division, News, ReasoningTokens
from sglang.srt.entrypoints.openai.chat_protocol import (
    ChatCompletionRequest,
    names_in,
    to_generate_body,
    without_batch,
)
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.entrypoints.openai.protocol import in_openai_terms, possible
from sglang.srt.entrypoints.openai.serving_base import OpenAIAnswer
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.frontend.generate_body import CheckedRequest
from sglang.srt.frontend.request_limits import check_length, check_token_ids
from sglang.srt.frontend.work_in_threads import encode_texts
from sglang.srt.function_call.call_tags import calls_in_text, forced_calls, wrong_schema
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.chat_templates import TemplateError
from sglang.srt.sampling.grammar import STRUCTURAL_TAG

MAX_REASON_CHARS = 400
NUM_LAST_IDS = 16  # of a prompt: may they be the beginning of reasoning?


class ChatCompletion:
    """One call of `/v1/chat/completions`.

    Raises:
        RequestError: naming the field that is wrong, in OpenAI's terms.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        settings: ChatSettings,
        request: ChatCompletionRequest,
        model: str,
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._request = request
        self._tools = tool_use_of(request)
        has_tools = self._tools.tools is not None
        if has_tools and settings.calls is None:
            raise field_error("tools", "start the server with --tool-call-parser")
        self._messages: list[dict[str, Any]] = []
        if request.input_ids is None:
            self._messages = messages_of(request)
            self._check_template(has_tools)
        self._calls = settings.calls if has_tools else None
        self._call_tag = self._tag_of_calls()
        self._check_size_of_calls()
        self._reasoning = settings.reasoning if request.separate_reasoning else None
        shows_special = self._calls is not None and self._calls.is_special
        try:
            self._checked = manager.check(to_generate_body(request, shows_special, self._call_tag))
        except RequestError as error:
            raise self.translate(error) from None
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.base = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        counts_reasoning = settings.reasoning is not None
        self.takes_long = request.logprobs or (counts_reasoning and not request.stream)
        self._is_open = False  # outputs begin with reasoning
        self._reasoning_tokens: dict[int, ReasoningTokens] = {}
        self._division = Division()
        self._sent: dict[int, ChoiceParts] = {}

    def _tag_of_calls(self) -> dict[str, Any] | None:
        """What holds calls of functions to their schemas; None if nothing does."""
        tools, form = self._tools, self._calls
        if form is None or not tools.held:
            return None
        if tools.must_call:
            return forced_calls(form, tools.held, is_single=tools.max_calls == 1)
        if form.is_bare:
            raise field_error(
                tools.strict,
                "needs a call that must be, as this form's calls begin with no mark of their own:"
                ' set tool_choice "required" or a function, or leave it out',
            )
        return calls_in_text(form, tools.held)

    def _check_size_of_calls(self) -> None:
        num_bytes = len(msgspec.json.encode(self._call_tag))
        most = self._manager.limits.max_grammar_bytes
        if num_bytes > most:
            reason = (
                f"the names and parameters of tools have {num_bytes} bytes together in a grammar,"
                f" more than {most} (--max-grammar-bytes); send fewer tools or smaller parameters"
            )
            raise field_error("tools", reason)

    def _check_template(self, has_tools: bool) -> None:
        templates, effort = self._settings.templates, "reasoning_effort"
        try:
            templates.check(has_tools)
        except TemplateError as error:
            raise field_error("messages", str(error)) from None
        if self._request.reasoning_effort is not None and not templates.reads(effort, has_tools):
            raise field_error(effort, "the model's chat template does not read it; leave it out")

    @property
    def streams(self) -> bool:
        return self._request.stream

    async def answer(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the whole answer, once; closing it early aborts it."""
        async with aclosing((await self._prepare()).whole()) as outputs:
            async for output in outputs:
                yield output

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a stream; closing it early aborts what still runs."""
        async with aclosing((await self._prepare()).chunks()) as outputs:
            async for output in outputs:
                yield output

    def translate(self, error: RequestError) -> RequestError:
        """An error of `/generate` in the terms of this body."""
        error = without_batch(error)
        if self._call_tag is not None and STRUCTURAL_TAG in error.message:
            error = self._of_calls(error, self._call_tag)
        return in_openai_terms(error, names_in(self._request))

    def _of_calls(self, error: RequestError, tag: dict[str, Any]) -> RequestError:
        """An error that names the structural tag of calls, which no client has sent."""
        wrong = wrong_schema(error.message, tag, self._tools.held)
        if wrong is not None:
            return field_error(wrong[0].place, wrong[1])
        source = "tool_choice" if self._tools.must_call else self._tools.strict or "tools"
        field = error.field
        if field is not None and STRUCTURAL_TAG in field:
            field = source
        message = error.message.replace(f"sampling_params.{STRUCTURAL_TAG}", source)
        return RequestError(field, message.replace(STRUCTURAL_TAG, source), error.status_code)

    # ---------------------------------------------------------------- the prompt

    async def _prepare(self) -> OpenAIAnswer:
        """The call with its prompt.

        Raises:
            RequestError: if the template does not take the chat, or the prompt is too long.
        """
        closing, given = "", self._request.input_ids
        prompt = await self._render() if given is None else self._end_of_prompt(given)
        is_open = self._begins_open(prompt)
        grammar = self._checked.prompts[0].sampling_params.grammar
        has_free_text = self._call_tag is not None and not self._tools.must_call
        self._is_fixed = is_fixed = grammar is not None and not has_free_text
        if is_fixed and is_open and self._settings.reasoning is not None:
            closing = f"{self._settings.reasoning.end}\n\n"
            is_open = False
        self._is_open = is_open
        self._division = Division(
            reasoning=None if is_fixed else self._reasoning,
            is_open=is_open,
            streams_reasoning=self._request.stream_reasoning,
            calls=self._calls,
            names=self._tools.names,
            max_calls=self._tools.max_calls,
        )
        ids = await self._encode(("" if given else prompt) + closing)
        self._checked = self._with_prompt([*(given or []), *ids])
        return OpenAIAnswer(self._manager, self._checked, self, self._request.stream_options)

    def _begins_open(self, prompt: str) -> bool:
        """Whether outputs begin with reasoning: the format says so, or the prompt's end."""
        form = self._settings.reasoning
        if form is None:
            return False
        is_continued = self._request.continue_final_message and bool(self._messages)
        if is_continued and form.end in _text_of(self._messages[-1]):
            return False
        return form.starts_open or form.is_open_after(prompt)

    async def _render(self) -> str:
        request = self._request
        kwargs = {**self._settings.template_kwargs, **request.chat_template_kwargs}
        variables = {
            **kwargs,
            "messages": self._messages,
            "tools": self._tools.tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": request.begins_message,
        }
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        try:
            return await self._settings.templates.render(variables, request.continue_final_message)
        except TemplateError as error:
            reason = str(error)
            is_long = len(reason) > MAX_REASON_CHARS
            text = reason[:MAX_REASON_CHARS] + "..." * is_long
            printable = "".join(char if char.isprintable() else "?" for char in text)
            raise field_error("messages", printable.rstrip(".")) from None

    def _end_of_prompt(self, ids: list[int]) -> str:
        """The text of a prompt's last ids."""
        return self._manager.tokenizer.decode(ids[-NUM_LAST_IDS:], skip_special_tokens=False)

    async def _encode(self, prompt: str) -> list[int]:
        """Token ids of a rendered prompt, which has its own BOS. One that cannot fit is refused
        before any time goes into it."""
        if not prompt:
            return []
        limits, tokenizer = self._manager.limits, self._manager.tokenizer
        at_least, max_new = tokenizer.min_num_tokens(prompt), self._request.max_new_tokens or 1
        try:
            check_length("messages", max(1, at_least), max_new, limits, is_counted=False)
        except RequestError as error:
            raise self.translate(error) from None
        (ids,) = await encode_texts({"messages": prompt}, tokenizer, limits, False)
        check_token_ids("messages", ids, limits.vocab_size)
        return ids

    def _with_prompt(self, ids: list[int]) -> CheckedRequest:
        """The request with its prompt; without a length it gets all that is left."""
        (prompt,) = self._checked.prompts
        params = prompt.sampling_params
        if prompt.has_default_length:
            most = self._manager.limits.max_req_len
            params = msgspec.structs.replace(params, max_new_tokens=most)
        prompt = dataclasses.replace(prompt, input_ids=ids, sampling_params=params)
        return dataclasses.replace(self._checked, prompts=[prompt])

    # ---------------------------------------------------------------- the answer

    def choice(self, index: int, result: dict[str, Any]) -> dict[str, Any]:
        """A choice as a whole."""
        self._count_reasoning(index, result)
        parts = ChoiceParts(self._division)
        news = parts.news(result["text"], has_ended=True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": news.content or (None if news.calls or news.reasoning else ""),
            "reasoning_content": news.reasoning or None,
            "tool_calls": news.calls,
        }
        if news.calls:
            for call in news.calls:
                del call["index"]
        found = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result, 0),
            **_end_of(result, parts.num_calls),
        }
        if self._request.gives_prompt_ids:
            found["prompt_token_ids"] = self._checked.prompts[0].input_ids
        if self._request.return_token_ids:
            found["response_token_ids"] = result["output_ids"]
        if self._request.return_meta_info:
            found["meta_info"] = result["meta_info"]
        return found

    def news(self, index: int, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks: the role first, then what is new, then the reason of the end."""
        self._count_reasoning(index, result)
        parts = self._sent.get(index) or self._sent.setdefault(index, ChoiceParts(self._division))
        has_ended = result["meta_info"]["finish_reason"] is not None
        news = parts.news(result["text"], has_ended)
        found = []
        if not parts.has_begun:
            parts.has_begun = True
            first = self._chunk(index, {"role": "assistant", "content": ""})
            if self._request.gives_prompt_ids:
                first["prompt_token_ids"] = self._checked.prompts[0].input_ids
            found.append(first)
        if news or (has_ended and len(result["output_ids"]) > parts.num_tokens):
            found.append(self._chunk(index, _delta(news), self._logprobs(result, parts.num_tokens)))
            if self._request.return_token_ids:
                found[-1]["response_token_ids"] = result["output_ids"][parts.num_tokens :]
            parts.num_tokens = len(result["output_ids"])
        if has_ended:
            last = self._chunk(index, _delta(News())) | _end_of(result, parts.num_calls)
            if self._request.return_meta_info:
                last["meta_info"] = result["meta_info"]
            found.append(last)
        return found

    def usage_details(self, indices: Iterable[int]) -> dict[str, Any]:
        if self._settings.reasoning is None:
            return {}
        counts = self._reasoning_tokens
        num_tokens = sum(counts[index].count for index in indices if index in counts)
        return {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _count_reasoning(self, index: int, result: dict[str, Any]) -> None:
        form = self._settings.reasoning
        if form is None or self._is_fixed:
            return
        if index not in self._reasoning_tokens:
            skips = self._checked.prompts[0].sampling_params.skip_special_tokens
            stream = self._manager.tokenizer.decode_stream(skips)
            self._reasoning_tokens[index] = ReasoningTokens(form, self._is_open, stream)
        self._reasoning_tokens[index].update(result["output_ids"])

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }

    def _logprobs(self, result: dict[str, Any], start: int) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of a chat, from a token on."""
        if not self._request.logprobs:
            return None
        meta = result["meta_info"]
        entries = meta["output_token_logprobs"][start:]
        tops = meta.get("output_top_logprobs", [])[start:] or [[]] * len(entries)
        return {
            "content": [
                {**_token(entry), "top_logprobs": [_token(item) for item in possible(top)]}
                for entry, top in zip(entries, tops, strict=True)
            ],
            "refusal": None,
        }


def _delta(news: News) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": news.content} if news.content else {}
    if news.reasoning:
        delta["reasoning_content"] = news.reasoning
    if news.calls:
        delta["tool_calls"] = news.calls
    return delta


def _end_of(result: dict[str, Any], num_calls: int) -> dict[str, Any]:
    reason = result["meta_info"]["finish_reason"]
    has_called = num_calls > 0 and reason["type"] == "stop"
    return {
        "finish_reason": "tool_calls" if has_called else reason["type"],
        "matched_stop": reason.get("matched"),
    }


def _token(entry: list[Any]) -> dict[str, Any]:
    """A token and its log-probability; the bytes of a part of a character are not known."""
    logprob, _, text = entry
    is_whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
