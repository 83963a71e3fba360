"""Computes a few integers per row beside the forward pass of a step: rows are laid out before it,
tokens are committed after it. On a GPU each is one kernel: launches cost more than the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sglang.srt.layers.forward_batch import UNIFORM, ForwardBatch, GraphKey
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch

# The rows of `RowLayout.per_request`: the numbers that the host sends to the device for each
# request.
ROW = 0  # row of the request-to-token table
Q_LEN = 1  # rows fed
Q_START = 2  # place of its first row among the T of the step
NUM_PROMPT = 3  # rows that feed a prompt, 0 where a request feeds its pending tokens
EMITS = 4  # 1 if the step emits tokens of it, else 0
NUM_PREDICTED = 5  # tokens predicted, 0 where it emits nothing
NUM_READ = 6  # rows whose logits are read
READ_START = 7  # place of its first row among the S that are read
EMITS_ONLY_CONFIRMED = 8  # 1 or 0: see `StepCounts`
NUM_COUNTS = 9


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Room of a packed step: rows in all, and of these the most whose logits are read."""

    num_rows: int
    num_reads: int


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The numbers of rows that a step feeds and reads of its R requests.

    Attributes:
        q_lens: rows fed.
        num_read: rows whose logits are read: of a prompt from its last token on; else from the
            first pending token on if the request emits only what is confirmed, and from the last
            pending one on if not.
        num_predicted: tokens predicted; 0 where the step emits nothing.
        emits_only_confirmed: whether a draft is emitted only if the model, reading the row before
            it, predicts the same token. True of requests with `mtp_verify`, and of those without
            look-ahead, which have no drafts. The others emit predictions that no row has confirmed.
        is_plain: each request feeds its prompt or its one pending token, and one row of it is read
            at most.
        packed: None: the numbers are exact, and rows after the pending tokens feed the look-ahead
            token. Otherwise they are the most of each request, and the device divides
            `packed.num_rows` rows among the requests.
    """

    q_lens: list[int]
    num_read: list[int]
    num_predicted: list[int]
    emits_only_confirmed: list[bool]
    is_plain: bool = False
    packed: PackedSize | None = None

    @property
    def num_rows(self) -> int:
        """T, rows of the step in all, padding included."""
        return sum(self.q_lens) if self.packed is None else self.packed.num_rows

    @property
    def num_reads(self) -> int:
        """S, rows read in all, padding included."""
        return sum(self.num_read) if self.packed is None else self.packed.num_reads

    @classmethod
    def plain(cls, batch: ScheduleBatch) -> StepCounts:
        """Returns the counts of a step that predicts one token per request and has one pending
        token of each."""
        emits = [int(flag) for flag in batch.emits]
        q_lens = [num_prompt or 1 for num_prompt in batch.num_prompt_tokens]
        return cls(q_lens, emits, emits, [True] * len(emits), is_plain=True)

    @classmethod
    def of_drafts(cls, batch: ScheduleBatch, num_drafts: Sequence[int]) -> StepCounts:
        """Returns the counts of a step in which prompts are fed, and every other request feeds its
        certain token and its drafts, of R counts, 0 where a prompt is fed. It is plain where there
        are none."""
        if not any(num_drafts):
            return cls.plain(batch)
        split, count = batch.num_prompts, len(num_drafts)
        decodes = [1 + drafts for drafts in num_drafts[split:]]
        emits = [int(each) for each in batch.emits[:split]]
        q_lens = batch.num_prompt_tokens[:split] + decodes
        return cls(q_lens, emits + decodes, emits + [1] * len(decodes), [True] * count)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The S rows whose logits are read, request by request.

    Attributes:
        request: [S] int64; index among the R requests.
        offset: [S] int64; place among the rows read of that request.
        index: [S] int64; place among the T rows of the step.
        positions: [S] int64; of the token that the row predicts.
        rows: [S] int64; row of the request-to-token table.
    """

    request: torch.Tensor
    offset: torch.Tensor
    index: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A step's rows.

    Attributes:
        per_request: [NUM_COUNTS, R] int64; row Q_LEN has the rows that each feeds, and so on.
        input_ids, positions, slots: [T] int64.
        kv_lens: [R] int64.
        lookahead: None in plain steps.
    """

    per_request: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    reads: ReadRows
    lookahead: LookaheadLayout | None = None


@dataclass(frozen=True, slots=True)
class LookaheadLayout:
    """The layout of a step's rows, as far as confirming drafts needs it.

    Attributes:
        q_starts: [R + 1] int64; place of each request's first row, and the end of the last one's.
        num_pending: [R] int64; rows with the certain token and drafts that the target may confirm;
            1 for requests that feed a prompt or emit unconfirmed tokens.
        parents: [T] int32, for trees: the offset in its request of the row that a pending row
            follows; -1 for roots, rows of prompts and padding. None: all are chains.
        ancestors: [T] int64, for trees: see `ForwardBatch.ancestors`; -1 for rows of prompts and
            padding.
    """

    q_starts: torch.Tensor
    num_pending: torch.Tensor
    parents: torch.Tensor | None
    ancestors: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """The tokens that a step gives its R requests.

    Attributes:
        accept_lens: [R] int64; 0 where the step emits nothing.
        kept_lens: [R] int64.
        next_token_ids: [R, M] int64; the first accept_lens[i] of row i are accepted.
        path: [R, >= M] int32; for each accepted token the row that it follows, as an offset among
            the rows read of its request; None: the first rows in order.
        num_drafts: [R] int64; drafts that were fed; None: there were none.
    """

    accept_lens: torch.Tensor
    kept_lens: torch.Tensor
    next_token_ids: torch.Tensor
    path: torch.Tensor | None = None
    num_drafts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of captured graphs.

    Attributes:
        tokens: [3, T] int64; input ids, positions, slots.
        requests: [3, R] int64; rows, lengths, and the first R of `ForwardBatch.read_index`.
        q_starts: [R + 1] int64; for graphs that are packed (`GraphKey.is_packed`).
        ancestors, tree_starts: [T] and [R] int64, of the largest graph for trees; None where there
            is none.
        hidden: [N], in the model's type, for graphs with a `GraphKey.hidden_width`, see
            `hidden_of`; None where there is none.
    """

    tokens: torch.Tensor
    requests: torch.Tensor
    q_starts: torch.Tensor
    ancestors: torch.Tensor | None = None
    tree_starts: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def hidden_of(self, key: GraphKey) -> torch.Tensor | None:
        """`ForwardBatch.hidden` of a graph, [key.num_tokens, key.hidden_width]; None if it reads
        tokens alone. Graphs of all widths share the memory."""
        if key.hidden_width == 0:
            return None
        assert self.hidden is not None, "A graph reads hidden states, and there is no room for any."
        size = key.num_tokens * key.hidden_width
        return self.hidden[:size].view(key.num_tokens, key.hidden_width)


class StepOps(Protocol):
    """Each implementation computes the same, bit for bit, and none waits for the device."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, state: RequestRows, pool: ReqToTokenPool) -> None:
        """Compiles the kernels that steps need, before there is a request: it may overwrite row
        0."""

    def lay_out(
        self,
        batch: ScheduleBatch,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        """Sends the host's numbers of a step to the device, writes its entries of the page table
        (`write_table`), then calls `lay_out_rows`. After `state.initialize(batch.new_rows)`."""

    def write_table(self, writes: PageTableWrites, pool: ReqToTokenPool) -> None:
        """Writes a step's entries of the page table."""

    def lay_out_rows(
        self,
        per_request: torch.Tensor,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        """Gathers a step's T rows: a request's tokens after the watermark, those of its prompt
        that the step feeds or else the pending ones, then `lookahead_token`.

        Args:
            per_request: [NUM_COUNTS, R] int64, contiguous; the numbers of `counts`, on the device.
        """

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        """Ends a step that read at most one row of each request: all KV is kept, and the token
        drawn, one of `tokens` [S] int64, is pending. The watermark of `RequestRows.padding_row`
        stays where it is.

        Returns:
            [R, 1] int64; the token after each request's new watermark: the one drawn or, where
            nothing was read, the next one of the prompt.
        """

    def commit_run(
        self,
        layout: RowLayout,
        targets: torch.Tensor,
        confirmed: ConfirmedDrafts,
        num_unconfirmed: torch.Tensor | None,
        max_accepted: int,
        state: RequestRows,
    ) -> AcceptedTokens:
        """Ends a step with look-ahead. A request that emits only confirmed tokens gets its
        confirmed drafts and the target's token after them, and keeps the KV of the rows that these
        follow, which come first; then that token alone is pending. Any other request gets its first
        `num_unconfirmed` [R] int64 targets; they are pending, and the KV of the tokens that were
        pending is kept. The watermark of `RequestRows.padding_row` stays where it is.

        Args:
            layout: with `lookahead`.
            targets: [S] int64; the target's own token after each row read.
            max_accepted: M, the most tokens that a request gets.
        """

    def write_drafts(
        self,
        state: RequestRows,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Writes drafts: see `RequestRows.write_drafts`."""

    def fill(self, static: StaticInputs, key: GraphKey, batch: ForwardBatch) -> torch.Tensor | None:
        """Copies a step and the padding of a graph into the graph's inputs; hidden states of
        padding are zero. A graph for trees also serves steps without `tree_starts` (then a tree
        starts with the rows that its request feeds) and without `ancestors` (then all rows are
        causal).

        Returns:
            [T] int64, the place of each row of the step in the graph; None: they are its first
            rows.
        """


def pack_for_device(batch: ScheduleBatch, counts: StepCounts) -> np.ndarray:
    """Makes `RowLayout.per_request`, row by row: [NUM_COUNTS * R] int64."""
    numbers: dict[int, Sequence[int]] = {
        ROW: batch.rows,
        Q_LEN: counts.q_lens,
        Q_START: _starts(counts.q_lens),
        NUM_PROMPT: batch.num_prompt_tokens,
        EMITS: batch.emits,
        NUM_PREDICTED: counts.num_predicted,
        NUM_READ: counts.num_read,
        READ_START: _starts(counts.num_read),
        EMITS_ONLY_CONFIRMED: counts.emits_only_confirmed,
    }
    packed: list[int] = []
    for row in range(NUM_COUNTS):
        packed += numbers[row]
    return np.array(packed, dtype=np.int64)


def places_in_uniform_graph(batch: ForwardBatch, key: GraphKey) -> list[int] | None:
    """Returns the place of each row of the step in a graph whose requests all have `key.width`
    rows; None for other graphs, where they are the first rows."""
    assert key.is_packed or batch.q_starts is None, key
    if key.tag != UNIFORM or all(q_len == key.width for q_len in batch.q_lens):
        return None
    starts = range(0, len(batch.q_lens) * key.width, key.width)
    return [
        start + row
        for start, q_len in zip(starts, batch.q_lens, strict=True)
        for row in range(q_len)
    ]


def places_of_reads(
    reads: torch.Tensor, key: GraphKey, places: torch.Tensor | None
) -> torch.Tensor:
    """Returns `ForwardBatch.read_index` of the graph, given that of the step and the result of
    `fill`."""
    return reads if places is None or not key.skips_unread_rows else places[reads]


def rows_before(batch: ForwardBatch) -> list[int]:
    """Makes `ForwardBatch.q_starts` of a batch that is not packed."""
    return list(accumulate(batch.q_lens, initial=0))


def _starts(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens[:-1], initial=0))
