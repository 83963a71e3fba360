"""`/v1/chat/completions` over the tokenizer manager."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.chat_grammar import GAP, AnswerGrammar, grammar_of_calls
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
from sglang.srt.frontend.generate_body import CheckedRequest, check_generate_request
from sglang.srt.frontend.request_limits import check_length
from sglang.srt.frontend.work_in_threads import check_encoded_ids, encode_texts
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.chat_templates import TemplateError
from sglang.srt.parser.reasoning_parser import Outset, ReasoningFormat

MAX_REASON_CHARS = 400


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
        self._answer = AnswerGrammar()
        if self._calls is not None:
            content = next(iter(request.content_grammars), None)
            self._answer = grammar_of_calls(self._calls, self._tools, content)
            self._check_size("tools" if content is None else f"tools and {content[0]}")
        self._reasoning = settings.reasoning if request.separate_reasoning else None
        shows_special = self._calls is not None and self._calls.is_special
        limits = manager.limits
        # Without a length a chat gets all that its prompt leaves.
        defaults = {**limits.openai_sampling_defaults, "max_new_tokens": limits.max_req_len}
        try:
            body = to_generate_body(request, shows_special, self._answer.tag)
            self._checked = check_generate_request(body, limits, defaults)
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
        self._outset: Outset | None = None  # None: outputs have no reasoning
        self._reasoning_tokens: dict[int, ReasoningTokens] = {}
        self._division = Division()
        self._sent: dict[int, ChoiceParts] = {}

    def _check_size(self, parts: str) -> None:
        num_bytes = len(msgspec.json.encode(self._answer.tag))
        most = self._manager.limits.max_grammar_bytes
        if num_bytes > most:
            reason = (
                f"the names and parameters of {parts} have {num_bytes} bytes together in a grammar,"
                f" more than {most} (--max-grammar-bytes); send fewer tools or smaller parameters"
            )
            raise field_error("tools", reason)

    def _check_template(self, has_tools: bool) -> None:
        try:
            self._settings.templates.check(has_tools)
        except TemplateError as error:
            raise field_error("messages", str(error)) from None

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
        error = self._answer.translate(without_batch(error))
        return in_openai_terms(error, names_in(self._request))

    # ---------------------------------------------------------------- the prompt

    async def _prepare(self) -> OpenAIAnswer:
        """The call with its prompt.

        Raises:
            RequestError: if the template does not take the chat, or the prompt is too long.
        """
        given = self._request.input_ids
        prompt = await self._render(self._messages) if given is None else ""
        closing = self._hold(await self._find_outset(prompt))
        ids = await self._encode(prompt + closing)
        self._checked = self._with_prompt([*(given or []), *ids])
        return OpenAIAnswer(self._manager, self._checked, self, self._request.stream_options)

    async def _find_outset(self, prompt: str) -> Outset:
        """Finds where outputs begin, such as within reasoning: by the last mark in the end of the
        prompt, after all that is over, such as the last user's message."""
        form, given = self._settings.reasoning, self._request.input_ids
        if form is None:
            return Outset.FREE
        if given is not None:
            decode = self._manager.tokenizer.decode
            prompt = await asyncio.to_thread(decode, given, skip_special_tokens=False)
        if form.before_marks(prompt) == prompt:
            return form.outset_after("")
        if given is None:
            return form.outset_after(await self._render(self._messages, is_turn=True))
        return form.outset_after(await self._last_turn(prompt, form))

    async def _last_turn(self, prompt: str, form: ReasoningFormat) -> str:
        """The end of a prompt that was given as ids: after the last place where it has what the
        template puts between a user's message and an assistant's. All of it, if there is none."""
        try:
            between = await self._render([{"role": "user", "content": "-"}], is_turn=True)
        except RequestError:  # such prompts need no template
            return prompt
        between = form.before_marks(between)
        return prompt.rpartition(between)[2] if between.strip() else prompt

    def _hold(self, outset: Outset) -> str:
        """Lets a grammar hold what follows reasoning, and says how outputs are divided.

        Returns:
            What ends reasoning in the prompt, if outputs may have none.
        """
        (prompt,) = self._checked.prompts
        grammar, form, closing = prompt.sampling_params.grammar, self._settings.reasoning, ""
        is_fixed = grammar is not None and not self._answer.is_free
        self._outset = outset
        if form is not None and grammar is not None and is_fixed:
            knows = self._settings.templates.reads(form.start, self._tools.tools is not None)
            may_reason = outset.is_open or (outset is Outset.FREE and knows)
            if self._reasoning is None or not may_reason:
                closing = f"{form.end}{GAP}" if outset.is_open else ""
                self._outset = None
            else:
                name = names_in(self._request).get(grammar.kind, grammar.kind)
                self._answer = self._answer.behind_reasoning(name, grammar, form, outset)
                params = self._answer.in_place_of_others(prompt.sampling_params)
                prompt = dataclasses.replace(prompt, sampling_params=params)
                self._checked = dataclasses.replace(self._checked, prompts=[prompt])
        self._division = Division(
            reasoning=None if self._outset is None else self._reasoning,
            outset=outset,
            gap=GAP if is_fixed else None,
            streams_reasoning=self._request.stream_reasoning,
            calls=self._calls,
            names=self._tools.names,
            max_calls=self._tools.max_calls,
        )
        return closing

    async def _render(self, messages: list[dict[str, Any]], is_turn: bool = False) -> str:
        request = self._request
        kwargs = {**self._settings.template_kwargs, **request.chat_template_kwargs}
        variables = {
            **kwargs,
            "messages": messages,
            "tools": self._tools.tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": request.begins_message,
        }
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        try:
            return await self._settings.templates.render(
                variables, request.continue_final_message, is_turn
            )
        except TemplateError as error:
            reason = str(error)
            is_long = len(reason) > MAX_REASON_CHARS
            text = reason[:MAX_REASON_CHARS] + "..." * is_long
            printable = "".join(char if char.isprintable() else "?" for char in text)
            raise field_error("messages", printable.rstrip(".")) from None

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
        check_encoded_ids("messages", ids, tokenizer, limits.vocab_size)
        return ids

    def _with_prompt(self, ids: list[int]) -> CheckedRequest:
        """The request with its prompt."""
        (prompt,) = self._checked.prompts
        prompt = dataclasses.replace(prompt, input_ids=ids)
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
        if form is None or self._outset is None:
            return
        if index not in self._reasoning_tokens:
            prompt = self._checked.prompts[0]
            skips = prompt.sampling_params.skip_special_tokens
            stream = self._manager.tokenizer.decode_stream(skips, prompt.input_ids or ())
            self._reasoning_tokens[index] = ReasoningTokens(form, self._outset, stream)
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
                {**self._token(entry), "top_logprobs": [*map(self._token, possible(top))]}
                for entry, top in zip(entries, tops, strict=True)
            ],
            "refusal": None,
        }

    def _token(self, entry: list[Any]) -> dict[str, Any]:
        """A token and its log-probability; its bytes are known of parts of characters too."""
        logprob, token_id, text = entry
        token_bytes = self._manager.tokenizer.token_bytes.of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


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
