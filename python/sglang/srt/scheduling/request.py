"""A request in the scheduler (`Req`), and a step that is launched and not read yet
(`LaunchedStep`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from sglang.srt.constrained.grammar_sessions import GrammarSession
from sglang.srt.mem_cache.base_prefix_cache import Namespace
from sglang.srt.mem_cache.kv_ledger import RequestKV
from sglang.srt.messages.requests import FinishReason, LogprobOptions, PositionLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.hidden_file import HiddenFile
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import BatchRequest, GenerationBatchResult
from sglang.srt.tokenizer import StopFinder

HiddenStates = Literal["none", "all", "last"]
NO_ROWS = range(0)


@dataclass(slots=True, eq=False)
class Req:
    """A request from its arrival to its last output.

    Holds what the host knows. Where steps in flight change a value, it holds an upper bound.

    Attributes:
        committed: tokens with KV, by the last result read.
        committed_bound: the most that `committed` can be once all launched steps are read; exact
            while the request is prefilling.
        stop_finder: looks for stop strings in the output; None without any.
        fill_ids: prompt and output at the last admission, which prefill feeds.
        streams: its client gets tokens as they come.
        num_inflight, num_inflight_emits: launched, unread steps with this request, and how many
            of them emit.
        row_is_new: the device does not know the request's row yet.
        num_scored, num_scores_read: prompt positions whose logprobs have been launched; read.
        hidden_file: takes its hidden states instead of the answer; None: none does.
        num_hidden: positions whose hidden states have been read.
        input_logprob_news, output_logprob_news, hidden_news, step_len_news: results not sent yet.
        num_proposed_drafts, accept_histogram, drafts_by: see `ReqOutput`.
        num_sent, was_reported: output tokens sent to the client; whether anything was sent.
        weight_spans: of each model the labels of the weights that generated the output, each with
            the index of its first token.
        spans_were_sent: whether the client has got `weight_spans`.
        grammar: the grammar of its output; None: any output.
        must_finish: a drain or a weight update waits for its end, so it may start again even if no
            other request may.
    """

    req_id: int
    rid: str
    input_ids: list[int]
    params: SamplingParams
    width: StepWidth
    seed: int
    arrival: int
    namespace: Namespace
    stop_token_ids: frozenset[int]
    priority: int = 0
    streams: bool = False
    logprobs: LogprobOptions | None = None
    hidden_states: HiddenStates = "none"
    hidden_file: HiddenFile | None = None
    stop_finder: StopFinder | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    kv: RequestKV | None = None
    fill_ids: list[int] = field(default_factory=list)
    committed: int = 0
    committed_bound: int = 0
    num_inflight: int = 0
    num_inflight_emits: int = 0
    num_emitted_since_admission: int = 0
    num_scored: int = 0
    num_scores_read: int = 0
    num_hidden: int = 0
    input_logprob_news: list[PositionLogprobs] = field(default_factory=list)
    output_logprob_news: list[PositionLogprobs] = field(default_factory=list)
    hidden_news: list[bytes] = field(default_factory=list)
    step_len_news: list[int] = field(default_factory=list)
    num_proposed_drafts: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    drafts_by: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_sent: int = 0
    was_reported: bool = False
    num_cached_tokens: int = 0
    num_retractions: int = 0
    submitted_s: float = 0.0
    queue_time_s: float | None = None
    was_admitted: bool = False
    row_is_new: bool = False
    weight_spans: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    spans_were_sent: bool = False
    grammar: GrammarSession | None = None
    must_finish: bool = False

    @property
    def can_step(self) -> bool:
        """Tells whether it needs nothing but a place: its grammar is compiled and has answered the
        last step. After a step that it sat out the host knows only then how many rows were kept.
        """
        grammar = self.grammar
        if grammar is None:
            return True
        return grammar.is_ready and not (grammar.sat_out and self.num_inflight)

    @property
    def is_prefilling(self) -> bool:
        """Tells whether prompt rows are still to be launched. Needs `kv`."""
        return self.committed_bound < len(self.fill_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated, by the last result read."""
        return self.params.max_new_tokens - len(self.output_ids)

    @property
    def ends_in_flight(self) -> bool:
        """Tells whether the steps in flight end it: it reaches max_new_tokens even if each gives
        one token."""
        return self.num_inflight_emits >= max(self.num_remaining, 1)

    @property
    def num_prompt_scores(self) -> int:
        """Prompt positions that are scored: all that are wanted but the first."""
        return 0 if self.logprobs is None else len(self.input_ids) - 1 - self.logprobs.start_len

    @property
    def max_cached_tokens(self) -> int:
        """The longest cached prefix that may be used, in tokens. The last token must be fed, and so
        must each position whose logits or hidden state are still wanted, since the cache holds only
        KV."""
        limit = len(self.input_ids) + len(self.output_ids) - 1
        if self.logprobs is not None and self.num_scored < self.num_prompt_scores:
            limit = min(limit, self.logprobs.start_len + self.num_scored)
        if self.hidden_states == "all":
            limit = min(limit, self.num_hidden)
        return limit

    def begin_weight_span(self, weight_version: str, model: str) -> None:
        """Notes that the output comes from these weights of a model, from its next token on."""
        start, spans = len(self.output_ids), self.weight_spans.setdefault(model, [])
        if spans and spans[-1][1] == start:
            spans.pop()
        if not spans or spans[-1][0] != weight_version:
            spans.append((weight_version, start))
        self.spans_were_sent = False

    def count_drafts(self, num_drafts: int, num_confirmed: int, maker: str | None) -> None:
        """Counts the drafts of a step that verified at least one, with the name of their drafter if
        the server has several."""
        self.num_proposed_drafts += num_drafts
        missing = num_confirmed + 1 - len(self.accept_histogram)
        self.accept_histogram += [0] * missing
        self.accept_histogram[num_confirmed] += 1
        if maker is not None:
            proposed, correct = self.drafts_by.get(maker, (0, 0))
            self.drafts_by[maker] = proposed + num_drafts, correct + num_confirmed

    def add_hidden(self, states: torch.Tensor) -> None:
        """Adds the hidden states of the next positions, see `HostResult`."""
        self.num_hidden += len(states)
        if self.hidden_file is not None:
            self.hidden_file.add(states)
        else:
            self.hidden_news += [row.tobytes() for row in states[:, -1].float().numpy()]

    def drop_hidden_past_output(self) -> None:
        """Drops hidden states of rows that a step kept past the stop. One state stays for each
        token but the last (`all`), or for each output token (`last`)."""
        wanted = max(1, len(self.output_ids))
        if self.hidden_states == "all":
            wanted += len(self.input_ids) - 1
        excess = self.num_hidden - wanted
        if excess > 0:
            self.num_hidden -= excess
            if self.hidden_file is None:
                del self.hidden_news[-excess:]

    @property
    def known_ids(self) -> list[int]:
        """Tokens of prompt and output, by the last result read; not to be changed."""
        return self.input_ids + self.output_ids if self.output_ids else self.input_ids


class LaunchedRow(NamedTuple):
    """A request's part in a launched step.

    Attributes:
        batch_request: its numbers, which the worker gets.
        max_kept: the increase of `committed_bound` at launch.
        scored, hidden: offsets of its rows of which the step returns prompt logprobs and hidden
            states. In a decode step only hidden states of kept rows count.
    """

    req: Req
    batch_request: BatchRequest
    max_kept: int
    scored: range = NO_ROWS
    hidden: range = NO_ROWS

    @property
    def emits(self) -> bool:
        """Tells whether the step accepts tokens of it."""
        return self.batch_request.emits

    @property
    def ends_prompt(self) -> bool:
        """Tells whether the step feeds its last prompt token."""
        return self.batch_request.num_prompt_tokens > 0 and self.batch_request.emits

    @property
    def is_decode(self) -> bool:
        return self.batch_request.num_prompt_tokens == 0


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose result is not read yet.

    Attributes:
        price_ms: its expected time; None if it was not priced.
    """

    rows: list[LaunchedRow]
    result: GenerationBatchResult
    price_ms: float | None = None
