"""What a step computes beside the forward pass, a few integers per row: rows are laid out before
it, tokens are committed after it. On a GPU each is one kernel: launches cost more than the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from sglang.srt.layers.forward_batch import UNIFORM, ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch

# The rows of `RowLayout.per_request`: what the host tells the device of each request.
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
class StepCounts:
    """What a step feeds and reads of its R requests.

    Attributes:
        q_lens: rows fed.
        num_read: rows whose logits are read: of a prompt from its last token on; else from the
            first pending token on if the request emits only what is confirmed, and from the last
            pending one on if not.
        num_predicted: tokens predicted; 0 where the step emits nothing.
        emits_only_confirmed: whether a draft is emitted only if the model, reading the row before
            it, predicts the same token. True of requests with `mtp_verify`, and of those without
            look-ahead, which have no drafts. The others emit predictions that no row has confirmed.
    """

    q_lens: list[int]
    num_read: list[int]
    num_predicted: list[int]
    emits_only_confirmed: list[bool]

    @classmethod
    def plain(cls, batch: ScheduleBatch) -> StepCounts:
        """Of a step that predicts one token per request and has one pending token of each."""
        emits = [int(flag) for flag in batch.emits]
        return cls(batch.max_q_lens, emits, emits, [True] * len(emits))


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The S rows whose logits are read, request by request.

    Attributes:
        request: [S] int64; which of the R requests.
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
    """

    per_request: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    reads: ReadRows


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of captured graphs.

    Attributes:
        tokens: [3, T] int64; input ids, positions, slots.
        requests: [3, R] int64; rows, lengths, and the first R of `ForwardBatch.read_index`.
    """

    tokens: torch.Tensor
    requests: torch.Tensor


class StepOps(Protocol):
    """Each implementation computes the same, bit for bit, and none waits for the device."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, state: RequestRows, pool: ReqToTokenPool) -> None:
        """Compiles what steps need, before there is a request: it may overwrite row 0."""

    def lay_out(
        self,
        batch: ScheduleBatch,
        counts: StepCounts,
        state: RequestRows,
        pool: ReqToTokenPool,
        lookahead_token: int,
    ) -> RowLayout:
        """Writes the step's entries of the page table, then gathers its T rows: a request's tokens
        behind the watermark, those of its prompt that the step feeds or else the pending ones, then
        `lookahead_token`."""

    def commit(self, layout: RowLayout, tokens: torch.Tensor, state: RequestRows) -> torch.Tensor:
        """Ends a step that read at most one row of each request: all KV is kept, and the token
        drawn, one of `tokens` [S] int64, is pending.

        Returns:
            [R, 1] int64; the token behind each request's new watermark: the one drawn or, where
            nothing was read, the next one of the prompt.
        """

    def fill(self, static: StaticInputs, key: GraphKey, batch: ForwardBatch) -> torch.Tensor | None:
        """Copies a step and the padding of a graph into the graph's inputs.

        Returns:
            [T] int64, the place of each row of the step in the graph; None: they are its first.
        """


def pack_for_device(batch: ScheduleBatch, counts: StepCounts) -> np.ndarray:
    """`RowLayout.per_request`, row by row: [NUM_COUNTS * R] int64."""
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
    """Place of each row of the step in a graph of which every request has `key.width` rows; None
    where they are the graph's first rows, as in all other graphs."""
    if key.tag != UNIFORM or all(q_len == key.width for q_len in batch.q_lens):
        return None
    starts = range(0, len(batch.q_lens) * key.width, key.width)
    return [
        start + row
        for start, q_len in zip(starts, batch.q_lens, strict=True)
        for row in range(q_len)
    ]


def _starts(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens[:-1], initial=0))
