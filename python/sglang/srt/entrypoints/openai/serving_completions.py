"""`/v1/completions` and `/v1/models` over the tokenizer manager."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sglang.srt.entrypoints.openai.protocol import (
    CompletionRequest,
    Prompts,
    in_openai_terms,
    prompts_of,
    to_generate_body,
)
from sglang.srt.managers.body_parsing import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager

START_TIME = int(time.time())


def describe_models(name: str, context_len: int) -> dict[str, Any]:
    """The answer of `/v1/models`."""
    return {"object": "list", "data": [describe_model(name, context_len)]}


def describe_model(name: str, context_len: int) -> dict[str, Any]:
    """The answer of `/v1/models/{name}`."""
    return {
        "id": name,
        "object": "model",
        "created": START_TIME,
        "owned_by": "sglang-adaptive",
        "root": name,
        "parent": None,
        "max_model_len": context_len,
    }


class Completion:
    """One call of `/v1/completions`.

    Raises:
        RequestError: naming the field that is wrong, in OpenAI's terms.
    """

    def __init__(self, manager: TokenizerManager, request: CompletionRequest, model: str) -> None:
        self._manager = manager
        self._request = request
        self._prompts: Prompts = prompts_of(request)
        try:
            self._checked = manager.check(to_generate_body(request, self._prompts))
        except RequestError as error:
            raise in_openai_terms(error) from None
        self._base = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def answer(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the whole completion, once; closing it early aborts it."""
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                results: Any = await anext(outputs)
            except RequestError as error:
                raise in_openai_terms(error) from None
        choices = [
            self._choice(index, result, 0, result["text"], 0)
            for index, result in enumerate(results)
        ]
        yield {**self._base, "choices": choices, "usage": self._usage(results)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields what is new since the last chunk of a choice, then the usage if wanted."""
        num_chars: dict[int, int] = {}
        num_tokens: dict[int, int] = {}
        latest: dict[int, dict[str, Any]] = {}
        options = self._request.stream_options
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                async for result in outputs:
                    index = result["index"]
                    start, seen = num_chars.get(index, 0), num_tokens.get(index, 0)
                    piece = result["text"][start:]
                    choice = self._choice(index, result, seen, piece, start)
                    num_chars[index] = len(result["text"])
                    num_tokens[index] = len(result["output_ids"])
                    latest[index] = result
                    yield {**self._base, "choices": [choice]}
            except RequestError as error:
                raise in_openai_terms(error) from None
        if options is not None and options.include_usage:
            yield {**self._base, "choices": [], "usage": self._usage(list(latest.values()))}

    def _choice(
        self, index: int, result: dict[str, Any], num_tokens: int, piece: str, start: int
    ) -> dict[str, Any]:
        """A choice with the text `piece`, and the logprobs from output token `num_tokens` on."""
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        is_first = start == 0 and num_tokens == 0
        echo = self._prompt_text(index) if self._request.echo and is_first else ""
        offset = start + (len(self._prompt_text(index)) if self._request.echo and start else 0)
        return {
            "index": index,
            "text": echo + piece,
            "logprobs": self._logprobs(meta, num_tokens, is_first, offset),
            "finish_reason": None if reason is None else reason["type"],
            "matched_stop": None if reason is None else reason.get("matched"),
        }

    def _logprobs(
        self, meta: dict[str, Any], num_tokens: int, is_first: bool, offset: int
    ) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        entries = list(meta["output_token_logprobs"][num_tokens:])
        tops = list(meta.get("output_top_logprobs", [])[num_tokens:])
        if self._request.echo and is_first:
            entries = meta["input_token_logprobs"] + entries
            tops = meta.get("input_top_logprobs", []) + tops
        texts = [text for _, _, text in entries]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "top_logprobs": [
                None if top is None else {text: logprob for logprob, _, text in top} for top in tops
            ]
            or None,
            "text_offset": offsets,
        }

    def _prompt_text(self, index: int) -> str:
        """The prompt of a choice; choices are in prompt order, n of each."""
        place = index // (self._request.n or 1)
        if self._prompts.texts is not None:
            return self._prompts.texts[place]
        ids = (self._prompts.ids or [])[place]
        return self._manager.tokenizer.decode(ids, skip_special_tokens=True)

    def _usage(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        metas = [result["meta_info"] for result in results]
        prompt = sum(meta["prompt_tokens"] for meta in metas) // (self._request.n or 1)
        output = sum(meta["completion_tokens"] for meta in metas)
        cached = sum(meta["cached_tokens"] for meta in metas)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
