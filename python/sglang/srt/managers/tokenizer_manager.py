"""The front end's side of every request: checks, tokens, state, answers, aborts, health.
It lives on one asyncio loop, that of the HTTP server or of the Engine's background thread."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from sglang.srt.constrained.grammar_check import GrammarCheck
from sglang.srt.control.client import PING_TIMEOUT_S, ControlClient
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.frontend.generate_body import (
    HIDDEN_STATES,
    CheckedPrompt,
    CheckedRequest,
    GenerateReqInput,
    check_generate_request,
)
from sglang.srt.frontend.generate_call import GenerateCall, Sample
from sglang.srt.frontend.hidden_files import HiddenFiles
from sglang.srt.frontend.logprobs_and_hidden_lists import LogprobsAndHiddenLists
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.sampling_validation import expand_samples
from sglang.srt.frontend.tokenizing_calls import AbortSelector, TokenizingCalls
from sglang.srt.frontend.work_in_threads import check_grammars, encode_prompts, encode_texts
from sglang.srt.messages.control import TARGET_MODEL, AbortReq
from sglang.srt.messages.requests import (
    BROKEN_OUTPUT,
    DECODE_FAILED,
    STOP_TOO_SLOW,
    BatchStrOutput,
    FinishReason,
    ReqTextOutput,
    ToFrontend,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.observability.request_metrics import RequestMetrics
from sglang.srt.process_watch import ProcessWatch
from sglang.srt.request_id import CURRENT
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer import Tokenizer
from sglang.srt.utils.common import ServerStatus as ServerStatus

logger = logging.getLogger(__name__)

# Tokens per output of a request that does not stream: the front end sees that the model works, and
# a large answer is built bit by bit.
UNSTREAMED_INTERVAL = 50
HEALTH_TIMEOUT_S = 20.0
PROBE_PARAMS = {"temperature": 0, "max_new_tokens": 1, "min_new_tokens": 0, "n": 1, "regex": ""}
PROBE = {"input_ids": [0], "sampling_params": PROBE_PARAMS, "no_logs": True, "log_metrics": False}
ABORT_TIMEOUT_S = 3.0  # for the last chunks of requests aborted at shutdown
Answer = dict[str, Any] | list[dict[str, Any]]
SHUTDOWN_MESSAGE = "The server is shutting down."


class TokenizerManager:
    """Turns client requests into scheduler messages and their outputs into answers.

    Args:
        send: takes messages for the scheduler.
        receive: waits for the next message of the detokenizer or the scheduler.
        request_log: gets a line at the end of each sample.
        grammars: checks those of requests; None where no request may have one.
        watch: says which other processes are stopped.
        hidden_files: of requests that have one; None where no request may.

    Attributes:
        control: the calls that are not requests to generate, and the engine's status.
        metrics: figures of all requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        send: Callable[[ToScheduler], None],
        receive: Callable[[], Awaitable[ToFrontend]],
        request_log: RequestLog | None = None,
        grammars: GrammarCheck | None = None,
        watch: ProcessWatch | None = None,
        hidden_files: HiddenFiles | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.draining = False
        self.failure: str | None = None
        self.control = ControlClient(send, watch)
        self.metrics = RequestMetrics()
        self._send = send
        self._receive = receive
        self._request_log = request_log
        self._grammars = grammars
        self._hidden_files = hidden_files
        self._req_ids = itertools.count()
        self._tokenizing = TokenizingCalls()
        self._samples: dict[int, Sample] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._progress = asyncio.Event()  # some request has got output; see health_generate
        self._text_of_token = functools.cache(tokenizer.token_text)  # one for each id at most

    # ---------------------------------------------------------------- generate

    def check(self, body: dict[str, Any] | GenerateReqInput) -> CheckedRequest:
        """Checks a `/generate` body.

        Raises:
            RequestError: naming the field that breaks a rule.
        """
        fields = msgspec.structs.asdict(body) if isinstance(body, GenerateReqInput) else body
        return check_generate_request(fields, self.limits)

    def generate_request(
        self, body: dict[str, Any] | GenerateReqInput
    ) -> AsyncGenerator[Answer, None]:
        """`generate` of a body that is not checked yet."""
        return self.generate(self.check(body))

    async def generate(self, request: CheckedRequest) -> AsyncGenerator[Answer, None]:
        """Runs a request; leaving the iterator early aborts what is still running.

        Yields:
            Not streamed: the answer once, a list of answers for a batch or n > 1. Streamed: the
            answer so far of one sample at a time, with its `index` where there are several.

        Raises:
            RequestError: if a prompt has no tokens or too many.
            ServiceError: if the server cannot take the request, or fails it.
        """
        self.refuse_if_closed()
        body, has_text = request.body, self.limits.has_tokenizer
        metrics = self.metrics if body.log_metrics else RequestMetrics()
        call = GenerateCall(request.is_batch, body.stream, metrics, has_text)
        try:
            await self._start(request, call)
            is_finished = False
            while not is_finished:
                await call.wait_for_news()
                call.raise_error()
                # More news may come while a chunk is read, so each is taken only when it is sent.
                while request.body.stream and (sample := call.pop_changed()) is not None:
                    yield call.chunk_of(sample)
                    call.raise_error()
                is_finished = call.finished
            if not request.body.stream:
                yield await call.answer()
        finally:
            self._leave(call)

    async def _start(self, request: CheckedRequest, call: GenerateCall) -> None:
        """Tokenizes, then sends all samples: none is sent if one prompt is refused.

        Samples that are aborted meanwhile end at once; the scheduler never sees them.
        """
        with self._tokenizing.registered(request) as tokenizing:
            await check_grammars(request, self._grammars)
            input_ids = await encode_prompts(request, self.tokenizer, self.limits)
        self.refuse_if_closed()
        messages = [
            (index, params, self._message(request, prompt, tokenizing.rids[index], ids, params))
            for index, (prompt, ids) in enumerate(zip(request.prompts, input_ids, strict=True))
            for params in expand_samples(prompt.params_for(len(ids), self.limits))
        ]
        if request.body.return_hidden_states == "file":
            assert self._hidden_files is not None, "See `RequestLimits`."
            self._hidden_files.begin([message for _, _, message in messages])
        for index, params, message in messages:
            text_of_token = self._text_of_token if request.body.return_text_in_logprobs else None
            lists = LogprobsAndHiddenLists(message, text_of_token)
            sample = call.add_sample(message.req_id, message.rid, lists, params.reports_steps)
            self._samples[sample.req_id] = sample
            if message.hidden_file is not None:
                sample.hidden_file = message.hidden_file.path
            if request.body.return_prompt_token_ids:
                sample.prompt_token_ids = message.input_ids
            sample.log_fields = self._log_fields(request, request.prompts[index], params)
        self._idle.clear()
        for index, _, message in messages:
            reason = tokenizing.reason_of(index)
            if reason is None:
                self._send(message)
            else:
                self._handle_output(self._unsent_output(message, reason))

    def _unsent_output(
        self, message: TokenizedGenerateReqInput, reason: FinishReason
    ) -> ReqTextOutput:
        """The only output of a sample that ends before it is sent."""
        spans = {TARGET_MODEL: [(self.control.status.weight_version, 0)]}
        counts = (len(message.input_ids), 0, 0, 0)
        return ReqTextOutput(message.req_id, "", [], reason, *counts, weight_spans=spans)

    def _message(
        self,
        request: CheckedRequest,
        prompt: CheckedPrompt,
        rid: str,
        input_ids: list[int],
        params: SamplingParams,
    ) -> TokenizedGenerateReqInput:
        body = request.body
        if not body.stream:
            params = msgspec.structs.replace(params, stream_interval=UNSTREAMED_INTERVAL)
        return TokenizedGenerateReqInput(
            req_id=next(self._req_ids),
            rid=rid,
            input_ids=input_ids,
            sampling_params=params,
            logprobs=prompt.logprobs_for(len(input_ids)),
            hidden_states=HIDDEN_STATES[body.return_hidden_states],
            priority=body.priority,
            cache_key=(body.extra_key, body.cache_salt),
            streams=body.stream,
        )

    async def encode(
        self, texts: Mapping[str, str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of texts that are no prompts; see `encode_texts`."""
        return await encode_texts(texts, self.tokenizer, self.limits.of_texts, add_special_tokens)

    def _log_fields(
        self, request: CheckedRequest, prompt: CheckedPrompt, params: SamplingParams
    ) -> dict[str, Any] | None:
        """Gives what the log says of a sample beside its figures; None to leave it out."""
        if self._request_log is None or request.body.no_logs:
            return None
        fields: dict[str, Any] = {"custom_labels": request.body.custom_labels}
        if (request_id := CURRENT.get()) is not None:
            fields["request_id"] = request_id.text
        if self._request_log.level >= 1:
            fields["sampling_params"] = params
        if self._request_log.level >= 2:
            fields["prompt"] = prompt.input_ids if prompt.text is None else prompt.text
        return fields

    def refuse_if_closed(self) -> None:
        """Raises ServiceError with 503 if no request is taken now."""
        if self.draining and self.failure is None:
            raise ServiceError(SHUTDOWN_MESSAGE, 503)
        self.control.refuse_if_unable()

    def _leave(self, call: GenerateCall) -> None:
        """Forgets the samples of a call; the client no longer waits for those still running."""
        left = [s for s in call.samples if self._samples.pop(s.req_id, None)]
        for sample in left:
            sample.note_end(self._request_log)
        running = [sample.req_id for sample in left]
        for sample in call.samples:
            if sample.finish_reason is not None and not sample.gave_file:
                self._end_file(sample.req_id, is_wanted=False)
        if running and self.failure is None:
            self._send(AbortReq(req_ids=running, aborted_message="The client has left."))
        if not self._samples:
            self._idle.set()

    # ---------------------------------------------------------------- abort, drain, fail

    def abort_request(
        self,
        rid: str | None = None,
        abort_all: bool = False,
        message: str | None = None,
        prefix: bool = False,
    ) -> int:
        """Ends requests by their rid, or all; clients get the output so far.

        Args:
            prefix: take every request whose rid begins with `rid`, not only its exact name.

        Returns:
            How many samples that concerns: running, waiting, or still being tokenized.
        """
        selector = AbortSelector(rid, abort_all, prefix)
        matching = [s.req_id for s in self._samples.values() if selector.selects(s.rid)]
        if matching:
            self._send(AbortReq(req_ids=matching, aborted_message=message))
        return len(matching) + self._tokenizing.abort(selector, message)

    async def drain(self, timeout_s: float, hasten: asyncio.Event) -> None:
        """Refuses new requests and waits while any runs, for `timeout_s` at most or until `hasten`.
        Then streams end with what they have; what else still waits gets 503, control calls last.
        """
        self.draining = True
        ends = (self._idle, hasten, self.control.frozen)
        waits = [asyncio.create_task(event.wait()) for event in ends]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        for sample in self._samples.values():
            sample.call.fail_unless_streamed(ServiceError(SHUTDOWN_MESSAGE, 503))
        if self.abort_request(abort_all=True, message=SHUTDOWN_MESSAGE):
            try:
                await asyncio.wait_for(self._idle.wait(), ABORT_TIMEOUT_S)
            except TimeoutError:
                self.fail_all(SHUTDOWN_MESSAGE)
        self.control.fail_all(SHUTDOWN_MESSAGE)

    def fail_all(self, reason: str) -> None:
        """Gives every waiting client an error, and every later one 503: a process has died."""
        if self.failure is not None:
            return
        self.failure = reason
        self._progress.set()
        for sample in self._samples.values():
            sample.call.fail(ServiceError(reason, 503))
        self._samples.clear()
        self.control.fail_all(reason)

    # ---------------------------------------------------------------- health

    async def health_ping(self, timeout_s: float = PING_TIMEOUT_S) -> None:
        """Returns when a message has gone round all processes, or all beat though one is busy.

        Raises:
            ServiceError: if it has not within `timeout_s`, or one of them is dead or stopped.
        """
        self.refuse_if_closed()
        await self.control.ping(timeout_s)

    async def health_generate(self, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Returns when the model has made output: of a probe, or of a request before it.

        While generation is paused there is none; then the processes are asked if they live.

        Raises:
            ServiceError: if there is none within `timeout_s`, or the probe fails.
        """
        if self.control.status.stopped:
            return await self.health_ping()
        self.refuse_if_closed()
        self._progress.clear()
        progress = asyncio.create_task(self._progress.wait())
        probe = asyncio.create_task(self._probe())
        try:
            await asyncio.wait((progress, probe), timeout=timeout_s, return_when="FIRST_COMPLETED")
            self.refuse_if_closed()
            if progress.done():
                return
            if self.control.status.stopped:  # since the probe was sent
                return await self.health_ping()
            if not probe.done():
                raise ServiceError(f"No token in {timeout_s:g} s.", 503)
            probe.result()
        finally:
            progress.cancel()
            probe.cancel()
            await asyncio.gather(progress, probe, return_exceptions=True)

    async def _probe(self) -> None:
        """One token; a server that is too full for that must make progress on other requests."""
        try:
            async with aclosing(self.generate_request(PROBE)) as outputs:
                await anext(outputs)
        except ServiceError as error:
            if error.status_code != 503:
                raise
            await self._progress.wait()

    # ---------------------------------------------------------------- outputs

    async def run(self) -> None:
        """Takes in messages until cancelled."""
        while True:
            self.handle(await self._receive())

    def handle(self, message: ToFrontend) -> None:
        """Takes in one message of the detokenizer or the scheduler."""
        if isinstance(message, BatchStrOutput):
            for output in message.outputs:
                try:
                    self._handle_output(output)
                except Exception:  # one sample's error must not end all the others
                    logger.exception("Request %d: its output failed.", output.req_id)
                    self._end_broken(output.req_id)
            return
        self.control.handle(message)

    def _handle_output(self, output: ReqTextOutput) -> None:
        reason = output.finish_reason
        if output.token_ids or (reason is not None and reason.type != "abort"):
            self._progress.set()
        sample = self._samples.get(output.req_id)
        if reason is not None:
            self._end_file(output.req_id, sample is not None and reason.type != "abort")
        if sample is None:  # its client has left
            return
        sample.add(output)
        if reason is not None:
            self._end(sample, still_runs=reason in (DECODE_FAILED, STOP_TOO_SLOW))

    def _end_file(self, req_id: int, is_wanted: bool) -> None:
        if self._hidden_files is not None:
            self._hidden_files.end(req_id, is_wanted)

    def _end_broken(self, req_id: int) -> None:
        """Ends a sample that cannot take in its output; the others go on."""
        sample = self._samples.get(req_id)
        if sample is not None:
            sample.finish_reason = BROKEN_OUTPUT
            sample.call.on_news(sample)
            self._end(sample, still_runs=True)

    def _end(self, sample: Sample, still_runs: bool) -> None:
        del self._samples[sample.req_id]
        if still_runs:
            self._send(AbortReq(req_ids=[sample.req_id]))
        if not self._samples:
            self._idle.set()
        sample.note_end(self._request_log)
