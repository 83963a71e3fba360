"""`/v1/completions` over the tokenizer manager."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from sglang.srt.entrypoints.openai.protocol import (
    COMPLETION_NAMES,
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    Prompts,
    in_openai_terms,
    names_of_format,
    possible,
    prompts_of,
    to_generate_body,
)
from sglang.srt.entrypoints.openai.serving_base import OpenAIAnswer
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import check_generate_request
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.tokenizer import Tokenizer


class TextOffsets:
    """Finds where tokens begin in a text, given bit by bit. Ids that are not shown take no place.

    Args:
        start: the place of the first one.
        context_ids: those before them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        start: int = 0,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._stream = tokenizer.decode_stream(skip_special_tokens, context_ids)
        self._end = start

    def push(self, ids: list[int]) -> list[int]:
        """The places of the next tokens."""
        lens = (len(self._stream.push([token_id])) for token_id in ids)
        *offsets, self._end = itertools.accumulate(lens, initial=self._end)
        return offsets


class Choice:
    """The part of a choice that has been sent so far.

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
        self._names = COMPLETION_NAMES | names_of_format(request.response_format)
        limits = manager.limits
        defaults = {**limits.openai_sampling_defaults, "max_new_tokens": DEFAULT_MAX_TOKENS}
        try:
            body = to_generate_body(request, self._prompts)
            self._checked = check_generate_request(body, limits, defaults)
        except RequestError as error:
            raise self.translate(error) from None
        self._params = self._checked.prompts[0].sampling_params  # of all prompts
        self._base = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._sent: dict[int, Choice] = {}

    @property
    def streams(self) -> bool:
        return self._request.stream

    def answer(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the whole completion, once; closing it early aborts it."""
        return self._run().whole()

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a stream; closing it early aborts what still runs."""
        return self._run().chunks()

    def _run(self) -> OpenAIAnswer:
        return OpenAIAnswer(self._manager, self._checked, self, self._request.stream_options)

    @property
    def takes_long(self) -> bool:
        """Many log-probabilities do."""
        return self._request.logprobs is not None

    @property
    def base(self) -> dict[str, Any]:
        return self._base

    def translate(self, error: RequestError) -> RequestError:
        return in_openai_terms(error, self._names)

    def usage_details(self, indices: Iterable[int]) -> dict[str, Any]:
        return {}

    def choice(self, index: int, result: dict[str, Any]) -> dict[str, Any]:
        """A choice as a whole."""
        return self._build(index, result, self._begin(index, result))

    def news(self, index: int, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what a choice has since the last call, which is one chunk."""
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = self._begin(index, result)
        return [self._build(index, result, sent)]

    def _begin(self, index: int, result: dict[str, Any]) -> Choice:
        echo = self._prompt_text(index) if self._request.echo else ""
        skips = self._params.skip_special_tokens
        context_ids = result.get("prompt_token_ids", ())
        offsets = TextOffsets(self._manager.tokenizer, skips, len(echo), context_ids)
        return Choice(echo, offsets)

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
        if self._request.return_token_ids:
            choice["token_ids"] = result["output_ids"][sent.num_tokens :]
            if not sent.has_begun:
                choice["prompt_token_ids"] = result["prompt_token_ids"]
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
            "top_logprobs": [None if top is None else _by_text(top) for top in tops] or None,
            "text_offset": offsets,
        }

    def _prompt_offsets(self, ids: list[int], text: str) -> list[int]:
        """Places of a prompt's tokens in its text: a BOS that encoding has added is not in it."""
        tokenizer = self._manager.tokenizer
        if self._prompts.texts is None:
            return TextOffsets(tokenizer, True).push(ids)
        bos = tokenizer.bos_token_id
        has_bos = bos is not None and ids[:1] == [bos]
        is_hidden = has_bos and not text.startswith(tokenizer.decode(ids[:1], False))
        stream, place, offsets = tokenizer.decode_stream(False), 0, [0] * is_hidden
        for token_id in ids[is_hidden:]:
            offsets.append(place)
            piece = stream.push([token_id])
            if not text.startswith(" ", place):  # encoding may add a space after special tokens
                piece = piece.removeprefix(" ")
            place = min(place + len(piece), len(text))
        return offsets

    def _prompt_text(self, index: int) -> str:
        """The prompt of a choice; choices are in prompt order, n of each."""
        place = index // self._params.n
        if self._prompts.texts is not None:
            return self._prompts.texts[place]
        ids = (self._prompts.ids or [])[place]
        return self._manager.tokenizer.decode(ids, skip_special_tokens=True)


def _by_text(top: list[Any]) -> dict[str, float]:
    """The best tokens at a position, best first. Of those with the same text the best stays."""
    found: dict[str, float] = {}
    for logprob, _, text in possible(top):
        found.setdefault(text, logprob)
    return found
