"""The common part of `/v1/completions` and `/v1/chat/completions`: runs a request of `/generate`
and puts its outputs into OpenAI's frame, as one answer or as chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from sglang.srt.entrypoints.openai.protocol import StreamOptions
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import CheckedRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class Form(Protocol):
    """A route's form of an answer."""

    @property
    def base(self) -> dict[str, Any]:
        """Returns the beginning of the answer, and of each chunk."""

    @property
    def takes_long(self) -> bool:
        """Tells whether `choice` and `news` are to be called in a thread."""

    def translate(self, error: RequestError) -> RequestError:
        """An error of `/generate` in the route's terms."""

    def usage_details(self, indices: Iterable[int]) -> dict[str, Any]:
        """Returns what the usage of these choices, as far as they were built, says beside its
        numbers."""

    def choice(self, index: int, result: dict[str, Any]) -> dict[str, Any]:
        """A choice as a whole."""

    def news(self, index: int, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what a choice has since the last call, for a chunk each; the last has the reason
        of its end, if it has ended."""


class OpenAIAnswer:
    """One call: its answer, or its chunks.

    Args:
        checked: a batch; its prompts have the same `n`.
        options: of a stream.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        checked: CheckedRequest,
        form: Form,
        options: StreamOptions | None,
    ) -> None:
        self._manager = manager
        self._checked = checked
        self._form = form
        self._options = options or StreamOptions()
        self._num_samples = checked.prompts[0].sampling_params.n

    async def whole(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the whole answer, once; closing it early aborts it."""
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                results: Any = await anext(outputs)
            except RequestError as error:
                raise self._form.translate(error) from None
        choices = [
            await self._build(self._form.choice, index, result)
            for index, result in enumerate(results)
        ]
        usage = self._usage_of(results, range(len(results)))
        yield {**self._form.base, "choices": choices, "usage": usage, **_metadata(results)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields what is new since the last chunk of a choice, then the usage if wanted.

        The last chunk of all has the metadata.
        """
        latest: dict[int, dict[str, Any]] = {}
        gives_usage = bool(self._options.include_usage)
        unfinished = set(range(len(self._checked.prompts) * self._num_samples))
        outputs: AsyncGenerator[Any, None] = self._manager.generate(self._checked)
        async with aclosing(outputs):
            try:
                async for result in outputs:
                    index = result["index"]
                    latest[index] = result
                    if result["meta_info"]["finish_reason"] is not None:
                        unfinished.discard(index)
                    is_last = not (unfinished or gives_usage)
                    metadata = _metadata(in_order(latest)) if is_last else {}
                    choices = await self._build(self._form.news, index, result)
                    for chunk in self._chunks_of(index, result, choices, metadata):
                        yield chunk
            except RequestError as error:
                raise self._form.translate(error) from None
        if gives_usage:
            results = in_order(latest)
            usage = self._usage_of(results, latest)
            yield {**self._form.base, "choices": [], "usage": usage, **_metadata(results)}

    def _chunks_of(
        self,
        index: int,
        result: dict[str, Any],
        choices: list[dict[str, Any]],
        metadata: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """The chunks with what is new of a choice; the last one has the metadata."""
        usage: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            usage = {"usage": usage_of([result], 1) | self._form.usage_details([index])}
        found = [{**self._form.base, "choices": [choice], **usage} for choice in choices]
        if found:
            found[-1] |= metadata
        return found

    def _usage_of(self, results: list[dict[str, Any]], indices: Iterable[int]) -> dict[str, Any]:
        return usage_of(results, self._num_samples) | self._form.usage_details(indices)

    async def _build(self, build: Any, index: int, result: dict[str, Any]) -> Any:
        if self._form.takes_long:
            return await asyncio.to_thread(build, index, result)
        return build(index, result)


def in_order(results: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of `/generate` by index, as a list."""
    return [results[index] for index in sorted(results)]


def usage_of(results: list[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    """OpenAI's usage. A prompt counts once, however many samples there are of it: its cached tokens
    are those of the first sample, since the others find the whole prompt in the cache."""
    metas = [result["meta_info"] for result in results]
    prompt = sum(meta["prompt_tokens"] for meta in metas) // num_samples
    output = sum(meta["completion_tokens"] for meta in metas)
    cached = sum(min(meta["cached_tokens"], meta["prompt_tokens"]) for meta in metas[::num_samples])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


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
