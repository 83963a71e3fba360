"""State of the calls that clients wait for: one `GenerateCall` each, with its `Sample`s.

A sample keeps its whole output, and its call which samples have news, so a slow reader gets fewer
and larger chunks, and there is no queue of them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.frontend.logprobs_and_hidden_lists import LogprobsAndHiddenLists
from sglang.srt.garbage import paused_collections
from sglang.srt.messages.control import ABORT_MESSAGE, version_field
from sglang.srt.messages.requests import FinishReason, ReqTextOutput
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.observability.request_metrics import RequestMeter, RequestMetrics

RETRY_STATUS_CODE = 503


class Sample:
    """One output in the making: the front end's side of one scheduler request.

    Attributes:
        index: place in the client's answer.
        prompt_token_ids: for a client that wants them back.
        hidden_file: path of its hidden states; None: it has none.
        gave_file: an answer has named that path.
    """

    def __init__(
        self,
        call: GenerateCall,
        index: int,
        req_id: int,
        rid: str,
        lists: LogprobsAndHiddenLists,
        reports_steps: bool = False,
    ) -> None:
        self.call = call
        self.index = index
        self.req_id = req_id
        self.rid = rid
        self.finish_reason: FinishReason | None = None
        self.log_fields: dict[str, Any] | None = None
        self.prompt_token_ids: list[int] | None = None
        self.hidden_file: str | None = None
        self.gave_file = False
        self._lists = lists
        self._meter = RequestMeter(call.figures, call.start_time)
        self._text = ""
        self._output_ids: list[int] = []
        self._step_lens: list[int] | None = [] if reports_steps else None
        self._weight_spans: dict[str, list[tuple[str, int]]] = {}
        self._latest: ReqTextOutput | None = None
        self._latency_s: float | None = None

    def add(self, output: ReqTextOutput) -> None:
        """Adds news and wakes the client's call. It runs for every token, so work that can wait is
        left to `as_dict`, which runs less often for a slow reader."""
        self._text += output.text
        self._output_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if self._latest is None and (output.token_ids or not self.is_aborted):
            prompt = output.prompt_tokens, output.cached_tokens
            self._meter.read_prompt(*prompt, output.queue_time_s)
        if output.token_ids:
            self._meter.add_tokens(len(output.token_ids))
        if self._lists.are_wanted:
            self._lists.add(output)
        if output.weight_spans:
            self._weight_spans = output.weight_spans
        if self._step_lens is not None:
            self._step_lens += output.step_lens
        if output.finish_reason is not None:
            self._latency_s = time.monotonic() - self.call.start_time
        self._latest = output
        self.call.on_news(self)

    def _counts(self) -> dict[str, Any]:
        """Returns the counts of the whole request in the latest news."""
        latest = self._latest
        if latest is None:
            return {}
        counts: dict[str, Any] = {
            "prompt_tokens": latest.prompt_tokens,
            "completion_tokens": latest.completion_tokens,
            "cached_tokens": latest.cached_tokens,
            "num_retractions": latest.num_retractions,
        }
        if self._step_lens is not None:
            counts["mtp_avg_effective_k"] = sum(self._step_lens) / max(len(self._step_lens), 1)
        if latest.accept_histogram:
            counts |= draft_meta(latest)
        if self._latency_s is not None:
            counts["e2e_latency"] = self._latency_s
        return counts

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason is not None and self.finish_reason.type == "abort"

    def note_end(self, log: RequestLog | None) -> None:
        """Counts and logs the end of this sample, finished or left by its client. Called once."""
        self._meter.end(is_aborted=self.finish_reason is None or self.is_aborted)
        if log is not None and self.log_fields is not None:
            log.write(self._log_line(log.level))

    def _log_line(self, level: int) -> dict[str, Any]:
        """Returns the line of the request log at the end of this sample, finished or left by its
        client."""
        reason = self.finish_reason
        fields: dict[str, Any] = {
            "rid": self.rid,
            "req_id": self.req_id,
            "finish_reason": "client left" if reason is None else reason.type,
            "status_code": 499 if reason is None else reason.status_code or 200,
            "ttft": self._meter.ttft_s,
            "e2e_latency": time.monotonic() - self.call.start_time,
            **self._counts(),
            **(self.log_fields or {}),
        }
        if level >= 2:
            fields["output"] = self._text
        return fields

    def _weight_meta(self) -> dict[str, Any]:
        """Returns, for each model, the label of the last token's weights, and the labels of all
        tokens as spans [start, end)."""
        meta: dict[str, Any] = {}
        for model, labels in self._weight_spans.items():
            ends = [*(start for _, start in labels[1:]), len(self._output_ids)]
            spans = [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(labels, ends, strict=True)
            ]
            name = version_field(model)
            meta |= {name: labels[-1][0], f"{name}s": spans}
        return meta

    @property
    def takes_long(self) -> bool:
        """Tells whether `as_dict` may take long."""
        return self._lists.take_long

    @property
    def has_output(self) -> bool:
        return bool(self._output_ids)

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer so far, in SGLang's form."""
        reason = self.finish_reason
        meta = {
            "id": self.rid,
            "finish_reason": None if reason is None else finish_reason_dict(reason),
            **self._weight_meta(),
            **self._counts(),
        }
        if self._lists.are_wanted:
            meta |= self._lists.meta_info(is_last=reason is not None)
        if self.hidden_file is not None and reason is not None and not self.is_aborted:
            meta["hidden_states_file"] = self.hidden_file
            self.gave_file = True
        if self._step_lens is not None:
            meta["mtp_effective_k"] = list(self._step_lens)
        answer: dict[str, Any] = {"text": self._text} if self.call.has_text else {}
        answer |= {"output_ids": list(self._output_ids), "meta_info": meta}
        if self.prompt_token_ids is not None:
            answer["prompt_token_ids"] = self.prompt_token_ids
        return answer


class GenerateCall:
    """One call of a client: its samples, in the order of the answer, and the future that wakes it.

    Args:
        metrics: counts its samples.

    Attributes:
        has_text: answers have a `text`.
    """

    def __init__(
        self, is_list: bool, streams: bool, metrics: RequestMetrics, has_text: bool = True
    ) -> None:
        self.has_text = has_text
        self.start_time = time.monotonic()
        self.figures = metrics.figures[streams]
        self._streams = streams
        self.samples: list[Sample] = []
        self._is_list = is_list
        self._num_unfinished = 0
        self._changed: dict[int, Sample] = {}
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None  # of the one task that reads the call
        self._error: Exception | None = None

    def add_sample(
        self, req_id: int, rid: str, lists: LogprobsAndHiddenLists, reports_steps: bool = False
    ) -> Sample:
        """Adds a sample to this call, the next in its answer."""
        sample = Sample(self, len(self.samples), req_id, rid, lists, reports_steps)
        self.samples.append(sample)
        self._num_unfinished += 1
        return sample

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def on_news(self, sample: Sample) -> None:
        """Notes that a sample has grown or ended, and wakes the client."""
        self._changed[sample.index] = sample
        if sample.finish_reason is not None:
            self._num_unfinished -= 1
            self._error = self._error or self._refusal(sample, sample.finish_reason)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the call with an error for its client."""
        self._error = self._error or error
        self._wake()

    def fail_unless_streamed(self, error: Exception) -> None:
        """Calls `fail` if the client has got nothing yet."""
        if not self._streams:
            self.fail(error)

    async def wait_for_news(self) -> None:
        """Returns when there is news since the last return. Only one task may wait."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False

    def _wake(self) -> None:
        """Wakes the task that waits. An `asyncio.Event` would serve any number of tasks, at a cost
        for each token."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def pop_changed(self) -> Sample | None:
        """Returns the sample whose news is the oldest, if there is any."""
        if not self._changed:
            return None
        return self._changed.pop(next(iter(self._changed)))

    def chunk_of(self, sample: Sample) -> dict[str, Any]:
        """Makes a chunk of a stream."""
        if not self._gives_list:
            return sample.as_dict()
        return {**sample.as_dict(), "index": sample.index}

    async def answer(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the answer of a finished call. Parts that may take long are made in a thread."""
        if any(sample.takes_long for sample in self.samples):
            return await asyncio.to_thread(self._answer)
        return self._answer()

    def _answer(self) -> dict[str, Any] | list[dict[str, Any]]:
        with paused_collections():
            answers = [sample.as_dict() for sample in self.samples]
        return answers if self._gives_list else answers[0]

    @property
    def _gives_list(self) -> bool:
        return self._is_list or len(self.samples) > 1

    def _refusal(self, sample: Sample, reason: FinishReason) -> Exception | None:
        """Returns the error of the whole call, if the end of a sample is one.

        A sample refused for lack of room fails its whole batch, so that the client can send it
        again elsewhere; other errors of one sample in a batch stay its own.
        """
        if reason.type != "abort" or reason.status_code is None:
            return None
        refused = reason.status_code == RETRY_STATUS_CODE and not sample.has_output
        if not refused and len(self.samples) > 1:
            return None
        message = reason.message or ABORT_MESSAGE
        if reason.status_code < 500:
            return RequestError(None, message, reason.status_code)
        return ServiceError(message, reason.status_code)


def draft_meta(output: ReqTextOutput) -> dict[str, Any]:
    """Returns SGLang's fields on the drafts of a request of which some were verified, and of a
    server with several drafters counts of each. Only steps that verified drafts count. The accept
    length of such a step is the number of confirmed drafts plus the model's own token."""
    num_proposed, histogram = output.num_proposed_drafts, output.accept_histogram
    by_drafter = {
        name: {"spec_num_proposed_drafts": proposed, "spec_num_correct_drafts": correct}
        for name, (proposed, correct) in output.drafts_by.items()
    }
    num_steps = sum(histogram)
    num_confirmed = sum(count * each for count, each in enumerate(histogram))
    return {
        "spec_verify_ct": num_steps,
        "spec_accept_length": 1 + num_confirmed / num_steps,
        "spec_accept_rate": num_confirmed / num_proposed,
        "spec_num_correct_drafts": num_confirmed,
        "spec_num_proposed_drafts": num_proposed,
        "spec_correct_drafts_histogram": histogram,
        # Names that earlier releases of SGLang gave to the last three, and that trainers read.
        "spec_accepted_drafts": num_confirmed,
        "spec_proposed_drafts": num_proposed,
        "spec_accept_histogram": histogram,
        "spec_accept_token_num": num_confirmed,
        "spec_draft_token_num": num_proposed,
        **({"spec_by_drafter": by_drafter} if by_drafter else {}),
    }


def finish_reason_dict(reason: FinishReason) -> dict[str, Any]:
    """Returns SGLang's form: the type and the fields that belong to it."""
    fields = msgspec.structs.asdict(reason)
    return {key: value for key, value in fields.items() if value is not None}
