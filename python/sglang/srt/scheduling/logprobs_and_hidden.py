"""Log-probabilities and hidden states: asks a step for them and hands them to its requests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from sglang.srt.layers.logprobs import HostLogprobs, LogprobQueries
from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.step.worker import HostResult, LogprobPlan, RowRef

T = TypeVar("T")


@dataclass(slots=True)
class LogprobsAndHiddenPlan:
    """Collects the rows whose log-probabilities and hidden states a step returns, request by
    request in the order of the batch."""

    hidden_rows: list[RowRef] = field(default_factory=list)
    _num_requests: int = 0
    _emitting: list[int] = field(default_factory=list)
    _emitted_options: list[LogprobOptions] = field(default_factory=list)
    _prompt_rows: list[RowRef] = field(default_factory=list)
    _prompt_targets: list[int] = field(default_factory=list)
    _prompt_options: list[LogprobOptions] = field(default_factory=list)

    def add(self, req: Req, num_prompt_rows: int, max_kept: int, emits: bool) -> tuple[int, int]:
        """Notes the next request of the step, which keeps at most max_kept rows; returns how many
        prompt logprobs and hidden states the step returns for it."""
        num_scored = self._add_scores(req, num_prompt_rows)
        num_hidden = self._add_hidden(req, num_prompt_rows, max_kept, emits)
        if emits and req.logprobs is not None:
            self._emitting.append(self._num_requests)
            self._emitted_options.append(req.logprobs)
        self._num_requests += 1
        return num_scored, num_hidden

    def logprob_plan(self) -> LogprobPlan | None:
        """Returns the plan; None when no log-probabilities are wanted."""
        if not self._emitting and not self._prompt_rows:
            return None
        return LogprobPlan(
            emitting=self._emitting,
            emitted=replace(
                _queries(self._emitted_options), kept=[item.kept for item in self._emitted_options]
            ),
            prompt_rows=self._prompt_rows,
            prompt_targets=self._prompt_targets,
            prompts=_queries(self._prompt_options),
        )

    def _add_scores(self, req: Req, num_prompt_rows: int) -> int:
        """Adds the prompt rows of this chunk whose next token must be scored and has not been
        yet."""
        options = req.logprobs
        if options is None or req.num_scored >= req.num_prompt_scores:
            return 0
        start = req.committed_bound
        first = options.start_len + req.num_scored
        end = min(start + num_prompt_rows, len(req.input_ids) - 1)
        count = max(0, end - first)
        self._prompt_rows.extend(
            (self._num_requests, position - start) for position in range(first, end)
        )
        self._prompt_targets.extend(req.input_ids[first + 1 : end + 1])
        self._prompt_options.extend([options] * count)
        req.num_scored += count
        return count

    def _add_hidden(self, req: Req, num_prompt_rows: int, max_kept: int, emits: bool) -> int:
        """Adds rows whose hidden states are wanted: each position once, or the last one of the
        step.

        In a decode step these are all rows that may be kept, since the number kept is not known
        yet.
        """
        if req.hidden_states == "none":
            return 0
        first = 0
        if num_prompt_rows and req.hidden_states == "all":
            first = min(max(0, req.num_hidden - req.committed_bound), max_kept)
        elif num_prompt_rows:
            first = max_kept - 1 if emits else max_kept
        self.hidden_rows.extend((self._num_requests, offset) for offset in range(first, max_kept))
        return max_kept - first


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
        not every row gave a token. None: the step gives none at all."""
        if self._hidden is None:
            return None
        start = self._next_hidden
        self._next_hidden += row.num_hidden
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
