"""`/v1/completions` and `/v1/models` over the tokenizer manager."""

from __future__ import annotations

import asyncio
import itertools
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
from sglang.srt.frontend.errors import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.tokenizer import Tokenizer

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


class TextOffsets:
    """Where tokens begin in a text, given bit by bit. Ids that are not shown take no place."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int) -> None:
        self._stream = tokenizer.decode_stream(skip_special_tokens)
        self._end = start

    def push(self, ids: list[int]) -> list[int]:
        """The places of the next tokens."""
        lens = (len(self._stream.push([token_id])) for token_id in ids)
        *offsets, self._end = itertools.accumulate(lens, initial=self._end)
        return offsets


class Choice:
    """What a choice has sent so far.

    Attributes:
        echo: the prompt's text, if it comes before the output.
    """

    def __init__(self, echo: str, offsets: TextOffsets) -> None:
        self.echo = echo
        self.offsets = offsets
        self.has_begun = False
        self.num_chars = 0
        self.num_tokens = 0


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
        self._params = self._checked.prompts[0].sampling_params  # of all prompts
        self._base = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def streams(self) -> bool:
        return self._request.stream

    async def answer(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the whole completion, once; closing it early aborts it."""
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                results: Any = await anext(outputs)
            except RequestError as error:
                raise in_openai_terms(error) from None
        choices = [await self._news(index, result, {}) for index, result in enumerate(results)]
        usage = self._usage(results, self._params.n)
        yield {**self._base, "choices": choices, "usage": usage, **_metadata(results)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields what is new since the last chunk of a choice, then the usage if wanted.

        The last chunk of all has the metadata.
        """
        sent: dict[int, Choice] = {}
        latest: dict[int, dict[str, Any]] = {}
        options = self._request.stream_options
        gives_usage = options is not None and bool(options.include_usage)
        gives_usages = options is not None and bool(options.continuous_usage_stats)
        unfinished = set(range(len(self._prompts) * self._params.n))
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                async for result in outputs:
                    index = result["index"]
                    choice = await self._news(index, result, sent)
                    latest[index] = result
                    if choice["finish_reason"] is not None:
                        unfinished.discard(index)
                    is_last = not (unfinished or gives_usage)
                    metadata = _metadata(_in_order(latest)) if is_last else {}
                    usage = {"usage": self._usage([result], 1)} if gives_usages else {}
                    yield {**self._base, "choices": [choice], **usage, **metadata}
            except RequestError as error:
                raise in_openai_terms(error) from None
        if gives_usage:
            results = _in_order(latest)
            usage = self._usage(results, self._params.n)
            yield {**self._base, "choices": [], "usage": usage, **_metadata(results)}

    async def _news(
        self, index: int, result: dict[str, Any], sent: dict[int, Choice]
    ) -> dict[str, Any]:
        """What is new of a choice. Many log-probabilities take long: a thread builds them."""
        choice = sent.get(index) or sent.setdefault(index, self._begin(index))
        if self._request.logprobs is None:
            return self._build(index, result, choice)
        return await asyncio.to_thread(self._build, index, result, choice)

    def _begin(self, index: int) -> Choice:
        echo = self._prompt_text(index) if self._request.echo else ""
        skips = self._params.skip_special_tokens
        return Choice(echo, TextOffsets(self._manager.tokenizer, skips, len(echo)))

    def _build(self, index: int, result: dict[str, Any], sent: Choice) -> dict[str, Any]:
        """A choice with what `sent` does not have yet, and notes that in it."""
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        echo = "" if sent.has_begun else sent.echo
        choice = {
            "index": index,
            "text": echo + result["text"][sent.num_chars :],
            "logprobs": None if self._request.logprobs is None else self._logprobs(meta, sent),
            "finish_reason": None if reason is None else reason["type"],
            "matched_stop": None if reason is None else reason.get("matched"),
        }
        sent.has_begun = True
        sent.num_chars = len(result["text"])
        sent.num_tokens = len(result["output_ids"])
        return choice

    def _logprobs(self, meta: dict[str, Any], sent: Choice) -> dict[str, Any]:
        entries = meta["output_token_logprobs"][sent.num_tokens :]
        tops = meta.get("output_top_logprobs", [])[sent.num_tokens :]
        offsets = sent.offsets.push([token_id for _, token_id, _ in entries])
        if self._request.echo and not sent.has_begun:
            prompt = meta["input_token_logprobs"]
            offsets = self._prompt_offsets([entry[1] for entry in prompt], sent.echo) + offsets
            entries = prompt + entries
            tops = meta.get("input_top_logprobs", []) + tops
        return {
            "tokens": [text for _, _, text in entries],
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "top_logprobs": [
                None if top is None else {text: logprob for logprob, _, text in top} for top in tops
            ]
            or None,
            "text_offset": offsets,
        }

    def _prompt_offsets(self, ids: list[int], text: str) -> list[int]:
        """Places of a prompt's tokens in its text: a BOS that encoding has added is not in it."""
        tokenizer = self._manager.tokenizer
        if self._prompts.texts is None:
            return TextOffsets(tokenizer, True, 0).push(ids)
        bos = tokenizer.bos_token_id
        has_bos = bos is not None and ids[:1] == [bos]
        is_hidden = has_bos and not text.startswith(tokenizer.decode(ids[:1], False))
        offsets = TextOffsets(tokenizer, False, 0).push(ids[is_hidden:])
        return [0] * is_hidden + offsets

    def _prompt_text(self, index: int) -> str:
        """The prompt of a choice; choices are in prompt order, n of each."""
        place = index // self._params.n
        if self._prompts.texts is not None:
            return self._prompts.texts[place]
        ids = (self._prompts.ids or [])[place]
        return self._manager.tokenizer.decode(ids, skip_special_tokens=True)

    def _usage(self, results: list[dict[str, Any]], num_samples: int) -> dict[str, Any]:
        """A prompt counts once, however many samples there are of it."""
        metas = [result["meta_info"] for result in results]
        prompt = sum(meta["prompt_tokens"] for meta in metas) // num_samples
        output = sum(meta["completion_tokens"] for meta in metas)
        cached = sum(meta["cached_tokens"] for meta in metas)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _in_order(results: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of `/generate` by index, as a list."""
    return [results[index] for index in sorted(results)]


def _metadata(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The field `metadata`: the label of the weights of the first choice, as in SGLang, and which
    weights generated which tokens of each choice. Empty if nothing is known."""
    metas = [result["meta_info"] for result in results]
    spans = [
        {"index": index, **span}
        for index, meta in enumerate(metas)
        for span in meta.get("weight_versions", [])
    ]
    if not spans:
        return {}
    version = next(meta["weight_version"] for meta in metas if "weight_version" in meta)
    return {"metadata": {"weight_version": version, "weight_versions": spans}}
