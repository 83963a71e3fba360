"""From the result of a step to tokens of requests, ends of requests and messages to clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy

from sglang.srt.garbage import paused_collections
from sglang.srt.messages.requests import (
    DECODE_FAILED,
    STOP_TOO_SLOW,
    TOO_MANY_KEPT,
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    PositionLogprobs,
    ReqOutput,
)
from sglang.srt.observability.request_step import RequestStep
from sglang.srt.scheduling.hidden_file import HiddenFile
from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenReader
from sglang.srt.scheduling.request import LaunchedRow, LaunchedStep, Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.step.worker import HostResult
from sglang.srt.tokenizer import NUM_CONTEXT_IDS

logger = logging.getLogger(__name__)


class BatchResultProcessor:
    """Reads steps. News for clients are collected and sent once per step.

    Args:
        send: takes the news of a step, to the detokenizer.
        stream_interval: tokens per chunk of a stream, for requests that say nothing else.
        on_step_read: is told, before the news are sent, what the step did to each of its requests
            that had not ended before, and the step's result.

    Attributes:
        num_generated: tokens of outputs since the start.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        send: Callable[[BatchTokenIDOutput], None],
        stream_interval: int,
        on_step_read: Callable[[Sequence[RequestStep], HostResult], None] | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._send = send
        self._stream_interval = stream_interval
        self._on_step_read = on_step_read
        self._outputs: list[ReqOutput] = []
        self._completing: list[tuple[Req, HiddenFile]] = []  # ended, their files not complete yet
        self.num_generated = 0

    @paused_collections()
    def process(self, step: LaunchedStep) -> HostResult:
        """Waits for a step's result, applies it and sends the news. KV changes its owner after
        that, so that clients do not wait for the prefix cache.

        Garbage is not collected meanwhile: log-probabilities of thousands of prompt positions are
        very many lists, and all are in use until the news are sent.
        """
        result = step.result.read()
        reader = LogprobsAndHiddenReader(result)
        request_steps: list[RequestStep] = []
        read_prompts: list[Req] = []
        for index, row in enumerate(step.rows):
            req, emits = row.req, row.emits
            req.num_inflight_emits -= emits
            accepted = result.next_token_ids[index][: result.accept_lens[index]]
            scores = reader.take_prompt_logprobs(req, len(row.scored))
            hidden = reader.take_hidden_states(row, result.kept_lens[index])
            logprobs = reader.take_output_logprobs(req, accepted) if emits else []
            if req.finish_reason is None:
                req.input_logprob_news += scores
                if hidden is not None:
                    req.add_hidden(hidden)
                num_kept = result.kept_lens[index]
                if result.num_drafts and result.num_drafts[index]:
                    num_confirmed = result.accept_lens[index] - 1
                    maker = result.makers[index] if result.makers else None
                    req.count_drafts(result.num_drafts[index], num_confirmed, maker)
                num_emitted = self._apply(row, accepted, num_kept, logprobs)
                if row.ends_prompt and accepted:
                    read_prompts.append(req)
                if self._on_step_read is not None:
                    request_steps.append(_request_step(index, row, num_emitted, num_kept))
        if self._on_step_read is not None:
            self._on_step_read(request_steps, result)
        self.flush()
        self._lifecycle.publish_prompts(read_prompts)
        for row in step.rows:
            row.req.num_inflight -= 1
            self._lifecycle.release_if_ended(row.req)
        return result

    def abort(self, req: Req, message: str, status_code: int | None, err_type: str | None) -> None:
        """Ends a request with the output that it has so far."""
        self.end(
            req,
            FinishReason(type="abort", message=message, status_code=status_code, err_type=err_type),
        )

    def end(self, req: Req, reason: FinishReason) -> None:
        """Ends a request and queues its last output; if it has a file, once that is complete."""
        self._lifecycle.finish(req, reason)
        if req.hidden_file is None or reason.type == "abort":
            if req.hidden_file is not None:
                req.hidden_file.drop()
            self._queue_output(req)
            return
        req.hidden_file.finish(req.num_hidden)
        self._completing.append((req, req.hidden_file))

    def wait_for_files(self, timeout_s: float) -> bool:
        """Waits up to the time for the oldest file of a request that has ended, and sends outputs
        whose files are complete; tells whether all are."""
        if self._completing:
            self._completing[0][1].is_done(timeout_s)
            self.flush()
        return not self._completing

    def flush(self) -> None:
        """Sends the queued messages, and those of ended requests whose files are complete."""
        if self._completing:
            self._queue_completed()
        if self._outputs:
            self._send(BatchTokenIDOutput(outputs=self._outputs))
            self._outputs = []

    def _queue_completed(self) -> None:
        ended, self._completing = self._completing, []
        for req, file in ended:
            if not file.is_done():
                self._completing.append((req, file))
                continue
            req.finish_reason = file.error() or req.finish_reason
            self._queue_output(req)

    def _apply(
        self,
        row: LaunchedRow,
        accepted: list[int],
        num_kept: int,
        logprobs: list[PositionLogprobs],
    ) -> int:
        """Moves the watermark and appends tokens; returns how many, after clipping at stops."""
        req = row.req
        req.committed += num_kept
        req.committed_bound -= row.max_kept - num_kept
        if not accepted:
            return 0
        req.num_emitted_since_admission += 1
        num_before = len(req.output_ids)
        reason = _grammar_problem(req)
        if reason is None and any(position.kept is None for position in logprobs):
            reason = TOO_MANY_KEPT
        reason = reason or accept_tokens(req, accepted)
        num_new = len(req.output_ids) - num_before
        self.num_generated += num_new
        if num_new and req.params.reports_steps:
            req.step_len_news.append(num_new)
        req.output_logprob_news += logprobs[:num_new]
        req.drop_hidden_past_output()
        if reason is not None:
            self.end(req, reason)
        elif self._is_chunk_due(req):
            self._queue_output(req)
        return num_new

    def _is_chunk_due(self, req: Req) -> bool:
        """Tells whether a chunk is due: the first token at once, the others by the stream
        interval."""
        interval = req.params.stream_interval or self._stream_interval
        return not req.was_reported or len(req.output_ids) - req.num_sent >= interval

    def _queue_output(self, req: Req) -> None:
        self._outputs.append(
            ReqOutput(
                req_id=req.req_id,
                token_ids=req.output_ids[req.num_sent :],
                finish_reason=req.finish_reason,
                prompt_tokens=len(req.input_ids),
                completion_tokens=len(req.output_ids),
                cached_tokens=req.num_cached_tokens,
                num_retractions=req.num_retractions,
                options=None if req.was_reported else _decode_options(req),
                input_logprobs=req.input_logprob_news,
                output_logprobs=req.output_logprob_news,
                hidden_states=req.hidden_news,
                step_lens=req.step_len_news,
                weight_spans={} if req.spans_were_sent else deepcopy(req.weight_spans),
                num_proposed_drafts=req.num_proposed_drafts,
                accept_histogram=list(req.accept_histogram),
                drafts_by=dict(req.drafts_by),
                queue_time_s=None if req.was_reported else req.queue_time_s,
            )
        )
        req.input_logprob_news, req.output_logprob_news = [], []
        req.hidden_news, req.step_len_news = [], []
        req.num_sent = len(req.output_ids)
        req.was_reported = req.spans_were_sent = True


def _decode_options(req: Req) -> DecodeOptions:
    params = req.params
    return DecodeOptions(
        skip_special_tokens=params.skip_special_tokens,
        stop_strings=params.stop_strings,
        no_stop_trim=params.no_stop_trim,
        stop_regexes=params.stop_regexes,
        min_new_tokens=params.min_new_tokens,
        context_ids=req.input_ids[-NUM_CONTEXT_IDS:],
    )


def _request_step(index: int, row: LaunchedRow, num_emitted: int, num_kept: int) -> RequestStep:
    reason = row.req.finish_reason
    return RequestStep(
        index=index,
        req_id=row.req.req_id,
        rid=row.req.rid,
        params=row.req.params,
        emits=row.emits,
        ends_prompt=row.ends_prompt,
        num_emitted=num_emitted,
        num_kept=num_kept,
        finish_reason=None if reason is None else reason.type,
    )


def _grammar_problem(req: Req) -> FinishReason | None:
    """Returns why a request must end if its grammar cannot be followed any more; None otherwise."""
    if req.grammar is None or req.grammar.problem is None:
        return None
    logger.warning("Request %s ends: %s.", req.rid, req.grammar.problem)
    return FinishReason(
        type="abort", message=req.grammar.problem, status_code=400, err_type="BadRequestError"
    )


def accept_tokens(req: Req, tokens: list[int]) -> FinishReason | None:
    """Appends accepted tokens up to the first stop; returns why the request ends, if it does.

    A run is clipped at a stop token, at the token that completes a stop text, and at
    max_new_tokens; a stop at the last allowed token counts as a stop.
    """
    for token in tokens:
        if req.num_remaining <= 0:
            break
        req.output_ids.append(token)
        if token in req.stop_token_ids:
            return FinishReason(type="stop", matched=token)
        try:
            found = req.stop_finder.push([token]) if req.stop_finder is not None else None
        except TimeoutError:
            return STOP_TOO_SLOW
        except Exception:  # one request's stops must not end all the others
            logger.exception("Request %s: its stops cannot be searched.", req.rid)
            return DECODE_FAILED
        if found is not None:
            return FinishReason(type="stop", matched=found.matched)
    if req.num_remaining <= 0:
        return FinishReason(type="length", length=len(req.output_ids))
    return None
