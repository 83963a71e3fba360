"""Log-probabilities and hidden states: asks a step for them and hands them to its requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from sglang.srt.layers.logprobs import HostLogprobs, LogprobQueries
from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs
from sglang.srt.scheduling.request import NO_ROWS, LaunchedRow, Req
from sglang.srt.step.worker import HostResult, LogprobPlan, RowRef

T = TypeVar("T")


def scored_rows(req: Req, num_prompt: int) -> range:
    """Returns the rows, by their offset among the `num_prompt` rows of the prompt's next chunk,
    whose next token must be scored and has not been yet."""
    if req.logprobs is None or req.num_scored >= req.num_prompt_scores:
        return NO_ROWS
    start = req.committed_bound
    first = req.logprobs.start_len + req.num_scored - start
    return range(first, min(num_prompt, len(req.input_ids) - 1 - start))


def hidden_rows(req: Req, num_prompt: int, max_kept: int, emits: bool) -> range:
    """Returns the rows, by their offset, whose hidden states are wanted: each position once, or the
    last one of the step.

    In a decode step these are all rows that may be kept, since the number kept is not known yet.
    """
    if req.hidden_states == "none":
        return NO_ROWS
    first = 0
    if num_prompt and req.hidden_states == "all":
        first = min(max(0, req.num_hidden - req.committed_bound), max_kept)
    elif num_prompt:
        first = max_kept - 1 if emits else max_kept
    return range(first, max_kept)


def logprob_plan(rows: Sequence[LaunchedRow]) -> LogprobPlan | None:
    """Returns the log-probabilities that the requests of a step want of it; None: none."""
    emitting, prompt_rows = list[int](), list[RowRef]()
    emitted, scored = list[LogprobOptions](), list[LogprobOptions]()
    targets = list[int]()
    for index, row in enumerate(rows):
        options = row.req.logprobs
        if options is None:
            continue
        if row.emits:
            emitting.append(index)
            emitted.append(options)
        first, wanted = row.batch_request.kv_len_before + 1, row.scored
        prompt_rows += [(index, offset) for offset in wanted]
        targets += row.req.input_ids[first + wanted.start : first + wanted.stop]
        scored += [options] * len(wanted)
    if not emitting and not prompt_rows:
        return None
    queries = replace(_queries(emitted), kept=[options.kept for options in emitted])
    return LogprobPlan(emitting, queries, prompt_rows, targets, _queries(scored))


class LogprobsAndHiddenReader:
    """Hands the log-probabilities and hidden states of a read step to its requests, which must ask
    in the order of the batch."""

    def __init__(self, result: HostResult) -> None:
        self._emitted, self._prompts = result.emitted_logprobs, result.prompt_logprobs
        self._hidden = result.hidden_states
        self._width = len(result.next_token_ids[0])  # positions of `_emitted` per request
        self._next_emitted = self._next_prompt = self._next_hidden = 0

    def take_prompt_logprobs(self, req: Req, num_scored: int) -> list[PositionLogprobs]:
        """Returns the logprobs of the request's next `num_scored` prompt positions."""
        if not num_scored or self._prompts is None or req.logprobs is None:
            return []
        first = req.logprobs.start_len + 1 + req.num_scores_read
        req.num_scores_read += num_scored
        targets = req.input_ids[first : first + num_scored]
        start = self._next_prompt
        self._next_prompt += num_scored
        return positions_logprobs(self._prompts, start, targets, req.logprobs)

    def take_output_logprobs(self, req: Req, tokens: list[int]) -> list[PositionLogprobs]:
        """Returns the logprobs of the tokens that an emitting request accepted."""
        if self._emitted is None or req.logprobs is None:
            return []
        first = self._next_emitted
        self._next_emitted += self._width
        return positions_logprobs(self._emitted, first, tokens, req.logprobs)

    def take_hidden_states(self, row: LaunchedRow, num_kept: int) -> torch.Tensor | None:
        """Returns hidden states of the rows that the step kept of a request, as the step gives
        them: all of them, or the last one if it wants only those that tokens were drawn from and
        not every row gave a token. None: it wants none of this step."""
        if self._hidden is None or not row.hidden:
            return None
        start = self._next_hidden
        self._next_hidden += len(row.hidden)
        if row.ends_prompt or not row.emits:
            num_fed_again = row.max_kept - num_kept
            return self._hidden[start : max(start, self._next_hidden - num_fed_again)]
        kept = self._hidden[start : self._next_hidden][:num_kept]
        req = row.req
        is_last = req.hidden_states == "last" and not req.params.emits_only_confirmed
        return kept[-1:] if is_last else kept


def positions_logprobs(
    values: HostLogprobs, start: int, token_ids: list[int], options: LogprobOptions
) -> list[PositionLogprobs]:
    """Returns the answers at the positions of these tokens, from position `start` on, reduced to
    those that their request wants."""
    part = slice(start, start + len(token_ids))
    columns = (
        token_ids,
        values.target[part],
        _columns(values.top_values[part], options.top_num),
        _columns(values.top_ids[part], options.top_num),
        _columns(values.chosen[part], len(options.token_ids)),
        values.kept[part],
    )
    return list(itertools.starmap(PositionLogprobs, zip(*columns, strict=True)))


def _columns(rows: list[list[T]], count: int) -> list[list[T]]:
    """Cuts all rows, which have one length, to their first `count` entries."""
    return [row[:count] for row in rows] if rows and len(rows[0]) > count else rows


def _queries(options: list[LogprobOptions]) -> LogprobQueries:
    return LogprobQueries(
        top_num=max((item.top_num for item in options), default=0),
        token_ids=[item.token_ids for item in options],
    )
