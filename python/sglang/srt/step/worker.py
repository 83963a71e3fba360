"""The contract between the scheduler and a worker: plain data down, plain data up.

The one rule (docs/architecture.md): every step, every request of the batch feeds its pending tokens
(those without KV), then look-ahead tokens; a prefix of the fed rows is kept (the watermark moves),
and a run of tokens is accepted. Workers differ in what they feed and accept, and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.layers.logit_adjustments import RowAdjustments
from sglang.srt.layers.logprobs import HostLogprobs, LogprobQueries, LogprobTensors
from sglang.srt.mem_cache.base_prefix_cache import Namespace
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.mem_cache.memory_pool import SharedPrefix
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.token_constraint import TokenConstraint


@dataclass(frozen=True, slots=True)
class NewRow:
    """State of a row that a request gets at admission.

    Attributes:
        row: index in the request-to-token table and in all device rows.
        num_committed: tokens whose KV the cache already has, fewer than there are.
        tokens: [n] int32; all that is known of the request's sequence: its prompt and, after a
            retraction, its output so far. Never changed after it is given.
        seed: int64 seed of the request's noise.
        adjustments: changes of its logits; None: none.
        namespace: text and KV are shared only between requests that have the same.
    """

    row: int
    num_committed: int
    tokens: np.ndarray
    params: SamplingParams
    seed: int
    adjustments: RowAdjustments | None = None
    namespace: Namespace = ()


@dataclass(frozen=True, slots=True)
class EndedText:
    """Text of a request that has ended and was not aborted. It stays in the request's row of the
    token table until another request gets the row.

    Attributes:
        row: index in the request-to-token table.
        start, end: the tokens [start, end) of the row, prompt and output up to the stop, that no
            cached prefix had when the request began.
        namespace: as in `NewRow`.
    """

    row: int
    start: int
    end: int
    namespace: Namespace


# A fed row: (index of its request in the batch, offset among the rows of that request).
RowRef = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Log-probabilities that a step returns.

    Attributes:
        emitting: indices of the emitting requests that want those of their tokens.
        emitted: the log-probabilities that they want, in that order.
        prompt_rows: rows whose next token is a prompt token to be scored.
        prompt_targets: those next tokens.
        prompts: the log-probabilities that are wanted there.
    """

    emitting: list[int]
    emitted: LogprobQueries
    prompt_rows: list[RowRef]
    prompt_targets: list[int]
    prompts: LogprobQueries


class BatchRequest(NamedTuple):
    """A request of a step, as the scheduler asks for it.

    Attributes:
        row: index in the request-to-token table.
        max_q_len: rows that have slots, look-ahead included. A worker feeds all of them, or fewer
            look-ahead rows.
        num_prompt_tokens: how many of its first rows feed tokens that it was admitted with
            (`NewRow.tokens`); 0 for a decode, which feeds its pending tokens.
        emits: the step accepts tokens of it (not so before the last prompt chunk).
        kv_len_before: tokens with KV before the step, at most.
    """

    row: int
    max_q_len: int = 1
    num_prompt_tokens: int = 0
    emits: bool = True
    kv_len_before: int = 0


# The numbers of several requests, in the order of `BatchRequest`.
Columns = tuple[list[int], list[int], list[int], list[bool], list[int]]


@dataclass(frozen=True)
class ScheduleBatch:
    """One step of R requests, as the scheduler asks for it. Never changed after it is built.

    State that depends on the results of a step in flight (watermarks, pending tokens) is on the
    device, in each request's row.

    Attributes:
        requests: those that feed a prompt come first. Their numbers are also there as columns:
            `rows` and so on, R entries each.
        ended_texts: of requests that have ended since the step before; told to whoever wants them
            (`RequestRows.on_end`) before `new_rows` are applied, which may be the same rows.
        new_rows, table_writes: applied before anything else of the step.
        all_greedy: whether every emitting request is greedy; greedy ones may be drawn for as well.
        adjusts_logits: whether any emitting request has penalties, biases or the like.
        logprobs: None when none are wanted.
        hidden_rows: rows whose last hidden states are returned. They may include rows that the
            worker did not feed, whose results mean nothing.
        shared_prefixes: of requests that decode, where all do and each feeds one row at most; empty
            where too little is known to be shared.
        constraint: restricts the tokens of requests with a grammar; None: no request has one.
        fixed_orders: all sums of the step's target go in fixed orders, since a request is
            deterministic (`SamplingParams`).
    """

    requests: list[BatchRequest]
    new_rows: list[NewRow] = field(default_factory=list)
    table_writes: PageTableWrites = field(default_factory=PageTableWrites)
    all_greedy: bool = False
    adjusts_logits: bool = False
    logprobs: LogprobPlan | None = None
    hidden_rows: list[RowRef] = field(default_factory=list)
    constraint: TokenConstraint | None = None
    ended_texts: list[EndedText] = field(default_factory=list)
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    fixed_orders: bool = False

    @cached_property
    def _columns(self) -> Columns:
        columns = [list(column) for column in zip(*self.requests, strict=True)]
        return cast(Columns, columns or [[] for _ in BatchRequest._fields])

    @property
    def rows(self) -> list[int]:
        return self._columns[0]

    @property
    def max_q_lens(self) -> list[int]:
        return self._columns[1]

    @property
    def num_prompt_tokens(self) -> list[int]:
        return self._columns[2]

    @cached_property
    def num_prompts(self) -> int:
        """Returns how many requests, the first ones, feed a prompt. All others emit."""
        return len(self.requests) - self.num_prompt_tokens.count(0)

    @property
    def emits(self) -> list[bool]:
        return self._columns[3]

    @property
    def kv_lens_before(self) -> list[int]:
        return self._columns[4]

    @property
    def scores_emitted(self) -> bool:
        """Tells whether any request wants log-probabilities of the tokens that the step emits."""
        return self.logprobs is not None and bool(self.logprobs.emitting)


class DraftMakers(NamedTuple):
    """Says which of a server's drafters made the drafts of R requests.

    Attributes:
        names: of the drafters, as people are shown them.
        of_request: [R] int64; place in `names`.
    """

    names: tuple[str, ...]
    of_request: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostResult:
    """`GenerationBatchResult`, read.

    Attributes:
        hidden_states: see `GenerationBatchResult`.
        num_drafts: R counts of drafts that were fed; empty where there were none.
        draft_length: see `GenerationBatchResult`.
        paths: R lists of M nodes, see `GenerationBatchResult`; empty where not asked for.
        makers: R names of drafters, see `GenerationBatchResult`; empty where there is one.
        record: see `GenerationBatchResult`.
    """

    next_token_ids: list[list[int]]
    accept_lens: list[int]
    kept_lens: list[int]
    emitted_logprobs: HostLogprobs | None = None
    prompt_logprobs: HostLogprobs | None = None
    hidden_states: torch.Tensor | None = None
    num_drafts: list[int] = field(default_factory=list)
    draft_length: int = 0
    paths: list[list[int]] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    record: object = None


@dataclass(frozen=True)
class GenerationBatchResult:
    """Outcome of a step, on its way from the device.

    Attributes:
        next_token_ids: [R, M] int64; the first accept_lens[i] of row i go to the client.
        accept_lens: [R] int64; 0 where the step emits nothing. On the host where it is known there.
        kept_lens: [R] int64; by how much each watermark moved. Likewise.
        emitted_logprobs: answers to `LogprobPlan.emitted`, M positions for each of its requests,
            of which the first accept_lens[i] mean something.
        prompt_logprobs: answers to `LogprobPlan.prompts`.
        hidden_states: [len(ScheduleBatch.hidden_rows), len(HiddenCapture.returned) + 1,
            hidden_size], those layers' inputs and the last hidden state, in the model's type.
        num_drafts: [R] int64; drafts fed, of which accept_lens[i] - 1 were confirmed in requests
            that emit only what is confirmed; None: there were none.
        draft_length: how far the drafter looked ahead, by its own count (`StepPlan.draft_length`).
        paths: [R, M] int32; of each accepted token the node of its request's tree that it follows,
            0 is the certain token; the first accept_lens[i] of row i mean something. None: none
            asked for them (`StepPlan.wants_paths`).
        makers: who made the drafts that were fed; None: one drafter makes all.
        record: what the worker wants to have back with the result (`Worker.observe`).

    The copy to the host begins when this is made.
    """

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    kept_lens: torch.Tensor
    emitted_logprobs: LogprobTensors | None = None
    prompt_logprobs: LogprobTensors | None = None
    hidden_states: torch.Tensor | None = None
    num_drafts: torch.Tensor | None = None
    draft_length: int = 0
    paths: torch.Tensor | None = None
    makers: DraftMakers | None = None
    record: object = None

    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        groups = self._copied()
        copy = HostCopy([tensor for group in groups for tensor in group])
        object.__setattr__(self, "_copy", copy)

    def _copied(self) -> list[tuple[torch.Tensor, ...]]:
        """Returns what goes to the host: lengths and tokens, counts of drafts, paths, who made the
        drafts, log-probabilities of both kinds, states."""
        emitted, prompts, hidden = self.emitted_logprobs, self.prompt_logprobs, self.hidden_states
        drafts = () if self.num_drafts is None else (self.num_drafts,)
        paths = () if self.paths is None else (self.paths,)
        return [
            (self.next_token_ids, self.accept_lens, self.kept_lens),
            drafts,
            paths,
            () if self.makers is None else (self.makers.of_request,),
            () if emitted is None else emitted.tensors,
            () if prompts is None else prompts.tensors,
            () if hidden is None else (hidden,),
        ]

    @property
    def is_ready(self) -> bool:
        """Tells whether `read` would return at once: a CPU computes while it launches."""
        return self._copy.is_ready

    def wait(self) -> None:
        """Waits until the step's tokens have been computed; the next drafts may not be yet."""
        self._copy.wait()

    def read(self) -> HostResult:
        """Waits for the step and returns its outcome, the same object to every caller."""
        return self._outcome

    @cached_property
    def _outcome(self) -> HostResult:
        copies = iter(self._copy.read())
        sizes = [len(group) for group in self._copied()]
        step, drafts, paths, makers, *others = (list(islice(copies, size)) for size in sizes)
        emitted, prompts, hidden = others
        token_ids, accept_lens, kept_lens = (tensor.tolist() for tensor in step)
        return HostResult(
            token_ids,
            accept_lens,
            kept_lens,
            emitted_logprobs=HostLogprobs.of(emitted),
            prompt_logprobs=HostLogprobs.of(prompts),
            hidden_states=hidden[0] if hidden else None,
            num_drafts=drafts[0].tolist() if drafts else [],
            draft_length=self.draft_length,
            paths=paths[0].tolist() if paths else [],
            makers=self._names(makers),
            record=self.record,
        )

    def _names(self, makers: list[torch.Tensor]) -> list[str]:
        """Names the drafter of each request; makers: the copy of `DraftMakers.of_request`."""
        names = () if self.makers is None else self.makers.names
        return [names[place] for places in makers for place in places.tolist()]


class Worker(Protocol):
    """Runs steps. Launching returns at once where the device is asynchronous."""

    def step_width(self, params: SamplingParams) -> StepWidth:
        """Returns the rows that a request with these parameters needs per step."""

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Launches one step."""

    def observe(self, result: HostResult) -> None:
        """Learns from a step's result; called once per step, in the order of launches."""
