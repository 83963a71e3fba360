"""Token ids of the scheduler to text for the front end."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.messages.control import HealthPing
from sglang.srt.messages.ipc import Receiver
from sglang.srt.messages.requests import (
    DECODE_FAILED,
    STOP_TOO_SLOW,
    BatchStrOutput,
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    ReqOutput,
    ReqTextOutput,
)
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 10_000  # of a message to the front end, but for its last output


class RequestText:
    """The text of one request so far, and how much of it is out.

    Held back are half a character, and an end that may be the beginning of a stop.
    """

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._options = options
        self._stream = tokenizer.decode_stream(options.skip_special_tokens, options.context_ids)
        strings, expressions = options.stop_strings, options.stop_regexes
        self._stops = StopSet([]) if options.no_stop_trim else StopSet(strings, expressions)
        self._text = ""
        self._num_shown = 0
        self._num_exempt_left = options.min_new_tokens

    def push(self, ids: list[int]) -> str:
        """Adds tokens; returns the text that may be shown now."""
        self._add(ids)
        if not self._stops:
            return self._show(len(self._text))
        found = self._stops.find(self._text, self._num_shown)
        return self._show(found.start if found else self._stops.num_safe_chars(self._text))

    def finish(self, ids: list[int], reason: FinishReason) -> str:
        """Adds the last tokens; returns the rest of the final text.

        A stop token has no text, and a text ends before its stop, unless `no_stop_trim`.
        """
        matched = reason.matched
        if isinstance(matched, int) and not self._options.no_stop_trim and ids[-1:] == [matched]:
            ids = ids[:-1]
        self._add(ids)
        self._text += self._stream.flush()
        found = None
        if isinstance(matched, str) and self._stops:
            found = self._stops.find(self._text, self._num_shown)
        return self._show(found.start if found else len(self._text))

    def _add(self, ids: list[int]) -> None:
        """Decodes tokens; the text of the first min_new_tokens ends no output."""
        if self._num_exempt_left > 0:
            exempt, ids = ids[: self._num_exempt_left], ids[self._num_exempt_left :]
            self._num_exempt_left -= len(exempt)
            self._text += self._stream.push(exempt)
            self._stops.num_exempt = len(self._text)
        self._text += self._stream.push(ids)

    def _show(self, end: int) -> str:
        piece = self._text[self._num_shown : end]
        self._num_shown = max(end, self._num_shown)
        return piece


class DetokenizerManager:
    """Keeps a `RequestText` per running request.

    Args:
        send: takes what goes to the front end.
    """

    def __init__(
        self, tokenizer: Tokenizer, send: Callable[[BatchStrOutput | HealthPing], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._texts: dict[int, RequestText] = {}

    def handle(self, message: BatchTokenIDOutput | HealthPing) -> None:
        """Passes one message of the scheduler on, with text."""
        if isinstance(message, HealthPing):
            self._send(message)
            return
        outputs = [news for output in message.outputs if (news := self._news_of(output))]
        for part in _parts_of(outputs):
            self._send(BatchStrOutput(outputs=part))

    def _news_of(self, output: ReqOutput) -> ReqTextOutput | None:
        """The output with its text; None for one of a request that has failed here before."""
        if output.options is None and output.req_id not in self._texts:
            return None
        reason = output.finish_reason
        try:
            if output.options is not None:
                self._texts[output.req_id] = RequestText(self._tokenizer, output.options)
            request = self._texts[output.req_id]
            if reason is None:
                text = request.push(output.token_ids)
            else:
                text = request.finish(output.token_ids, reason)
        except TimeoutError:
            # The scheduler has found no stop in the text so far, unless it ended the request.
            text = "" if reason else self._texts[output.req_id].finish([], STOP_TOO_SLOW)
            reason = STOP_TOO_SLOW
        except Exception:  # one request's text must not end all the others
            logger.exception("Request %d: its output cannot be decoded.", output.req_id)
            text, reason = "", DECODE_FAILED
        if reason is not None:
            self._texts.pop(output.req_id, None)
        return ReqTextOutput(
            req_id=output.req_id,
            text=text,
            token_ids=output.token_ids,
            finish_reason=reason,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            num_retractions=output.num_retractions,
            step_lens=output.step_lens,
            weight_spans=output.weight_spans,
            num_proposed_drafts=output.num_proposed_drafts,
            accept_histogram=output.accept_histogram,
            drafts_by=output.drafts_by,
            input_logprobs=output.input_logprobs,
            output_logprobs=output.output_logprobs,
            hidden_states=output.hidden_states,
            queue_time_s=output.queue_time_s,
        )


def _parts_of(outputs: list[ReqTextOutput]) -> Iterator[list[ReqTextOutput]]:
    """The outputs in parts that the front end reads one by one. It has other work between two, so
    a part ends after many log-probabilities."""
    part: list[ReqTextOutput] = []
    num_logprobs = 0
    for output in outputs:
        part.append(output)
        positions = itertools.chain(output.input_logprobs, output.output_logprobs)
        num_logprobs += sum(1 + len(p.top_logprobs) + len(p.chosen) for p in positions)
        if num_logprobs >= MAX_LOGPROBS:
            yield part
            part, num_logprobs = [], 0
    if part:
        yield part


def run_loop(receiver: Receiver[Any], manager: DetokenizerManager) -> None:
    """Handles messages until the process is told to exit."""
    while True:
        manager.handle(receiver.receive())
