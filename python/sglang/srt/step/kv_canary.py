"""Checks in every step that each KV slot holds the KV that the request reading it expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.step.request_rows import RequestRows

# Odd numbers of 64 bits, as int64, to mix a token with its position. The first is 2**64 divided by
# the golden ratio (multiplicative hashing: Knuth, TAOCP volume 3, section 6.4).
_TOKEN_FACTOR, _POSITION_FACTOR = -7046029254386353131, -4417276706812531889

# The notes on each slot.
SUM = 0  # checksum of all tokens that its KV depends on: the token fed and all that its row saw
OWN = 1  # the part of the sum that is the token's
NUM_UPDATES = 2  # how often weights had been replaced when it was written
NUM_NOTES = 3


class KVCanary:
    """Notes on each slot of each pool of a page table. The checksum of a slot covers the token that
    was fed there, its position, and all tokens that it follows: those before it, or the path above
    it in a tree. Only requests that share a prefix agree on the sums of its slots.

    A pool's notes are one of its tensors, so code that moves or releases KV must move and release
    them, or is found out. Below the watermark a slot must have the sum of the sequence in the token
    table. After it only draft steps of one round read slots that they have written; there the sum
    must be that of the path that the reader sees.

    If a model is fed each position's next token, the last slot of a page in a cached prefix may
    have another next token, that of the request that published it. That lowers the acceptance of
    drafts and changes no token. So the check allows it there, if all that the slot follows is
    right.

    For debugging: it waits for the device in every step, and reads all KV lengths. Make it before
    any code asks a pool for its tensors.

    Args:
        state: has the token table and the watermarks.
        num_updates: says how often weights have been replaced.
        shifts: for each pool, 0, or 1 where its model is fed each position's next token.
    """

    def __init__(
        self,
        state: RequestRows,
        memory: KVMemory,
        num_updates: Callable[[], int],
        shifts: Sequence[int],
    ) -> None:
        self._state = state
        self._page_table = memory.table.req_to_token
        self._page_size = memory.page_size
        self._notes = [pool.add_notes(NUM_NOTES) for pool in memory.pools]
        self._kv_starts = [pool.kv_starts for pool in memory.pools]
        self._shifts = tuple(shifts)
        self._num_updates = num_updates
        self._admissions = [_Admission()] * len(self._page_table)  # of each row's request

    @torch.inference_mode()
    def check(self, pool: int, batch: ForwardBatch) -> None:
        """Before a forward pass over a pool, compares the slots that it reads and notes the tokens
        that it writes to others. After an admission the target's pass comes first.

        Raises:
            RuntimeError: if a slot does not hold the KV that its reader expects, or a row is fed at
                a wrong position or written to a wrong slot.
        """
        admissions = self._admissions_of(batch.rows.tolist())
        steps = _Columns.of(batch, self._page_table)
        num_fed = len(steps.fed)
        if (batch.slots[num_fed:] >= self._page_size).any():
            raise RuntimeError(f"KV canary: padding is written to a slot of pool {pool}.")
        if num_fed == 0:
            return
        notes = self._notes[pool]
        stored = notes[steps.slots]
        paths = None if batch.ancestors is None else _Paths.of(batch, batch.ancestors, steps)
        positions = steps.columns[steps.fed] if paths is None else paths.positions
        own = self._own_parts(steps, stored[:, OWN], self._shifts[pool])
        own[steps.fed] = _mixed(batch.input_ids[:num_fed], positions)
        sums = steps.sums_of(own)
        is_read = steps.columns < steps.num_read[steps.requests]
        if (kv_starts := self._kv_starts[pool]) is not None:
            is_read &= steps.columns >= kv_starts[steps.rows]
        if paths is not None:
            is_read &= steps.columns < paths.first[steps.requests]
            along = paths.sums_of(own, sums)
            sums[steps.fed] = torch.where(paths.is_in_tree, along[:, -1], sums[steps.fed])
            wrong = paths.is_read & (stored[:, SUM][paths.places] != along)
            steps.refuse(wrong, paths.places, pool, "another token's KV is read at")
        num_cached, oldest = _on_device(admissions, own.device)[:, steps.requests]
        wrong = is_read & (stored[:, SUM] != sums)
        if self._shifts[pool]:
            before = stored[:, SUM] - stored[:, OWN]
            ends_page = (steps.columns + 1) % self._page_size == 0
            is_publishers = ends_page & (steps.columns < num_cached) & (before == sums - own)
            wrong &= ~is_publishers
        steps.refuse(wrong, None, pool, "another token's KV is read at")
        wrong = is_read & (stored[:, NUM_UPDATES] < oldest)
        steps.refuse(wrong, None, pool, "KV of weights before its admission is read at")
        wrong = batch.positions[:num_fed] != positions
        steps.refuse(wrong, steps.fed, pool, "a token is fed as if at another position to")
        written = batch.slots[:num_fed]
        wrong = written != steps.slots[steps.fed]
        steps.refuse(wrong, steps.fed, pool, "a token's KV is written beside")
        now = torch.full_like(written, self._num_updates())
        notes[written] = torch.stack((sums[steps.fed], own[steps.fed], now), dim=1)

    def _admissions_of(self, rows: list[int]) -> list[_Admission]:
        """Returns the admissions of the requests of `rows`; the KV of a new one is that of its
        cached prefix."""
        for row in rows:
            number = self._state.num_admitted[row]
            if self._admissions[row].number != number:
                num_cached = int(self._state.committed[row])
                self._admissions[row] = _Admission(number, num_cached, self._num_updates())
        return [self._admissions[row] for row in rows]

    def _own_parts(self, steps: _Columns, stored: torch.Tensor, shift: int) -> torch.Tensor:
        """[K] int64; the part that each column's token adds to the sums. The token is that of the
        token table below the watermark, else the one noted, `stored` [K] int64."""
        state, rows, columns = self._state, steps.rows, steps.columns
        last = self._page_table.shape[1] - 1
        tokens = state.tokens[rows, (columns + shift).clamp(max=last)]
        noted = torch.where(stored == 0, 1, stored)  # no sum fits a slot that was never written
        return torch.where(columns < state.committed[rows], _mixed(tokens, columns), noted)


@dataclass(frozen=True, slots=True)
class _Admission:
    """The admission of a row's request.

    Attributes:
        number: see `RequestRows.num_admitted`.
        num_cached: tokens of its cached prefix.
        num_updates: how often weights had been replaced.
    """

    number: int = 0
    num_cached: int = 0
    num_updates: int = 0


def _on_device(admissions: Sequence[_Admission], device: torch.device) -> torch.Tensor:
    """[2, R] int64; `num_cached` and `num_updates` of each."""
    values = [[each.num_cached for each in admissions], [each.num_updates for each in admissions]]
    return to_device(values, device, torch.int64)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The K entries of the page table that a batch reads or writes, request by request in order:
    all KV of each of the R requests that feed a row.

    Attributes:
        requests, rows, columns, slots: [K] int64.
        starts: [R] int64; place among the K of each request's first.
        num_read: [R] int64; tokens with KV from before the batch.
        fed: [T] int64; place of each fed row among the K, without padding.
    """

    requests: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    num_read: torch.Tensor
    fed: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, page_table: torch.Tensor) -> _Columns:
        q_starts = batch.q_starts
        if q_starts is None:
            host = list(accumulate(batch.q_lens, initial=0))
            q_starts = to_device(host, page_table.device, torch.int64)
        q_lens = q_starts.diff()
        lens = torch.where(q_lens > 0, batch.kv_lens, 0)
        starts = lens.cumsum(0) - lens
        requests = torch.repeat_interleave(lens)
        columns = torch.arange(len(requests), device=lens.device) - starts[requests]
        rows = batch.rows[requests]
        feeding = torch.repeat_interleave(q_lens)
        offsets = torch.arange(len(feeding), device=lens.device) - q_starts[feeding]
        num_read = lens - q_lens
        return cls(
            requests=requests,
            rows=rows,
            columns=columns,
            slots=page_table[rows, columns].to(torch.int64),
            starts=starts,
            num_read=num_read,
            fed=(starts + num_read)[feeding] + offsets,
        )

    def sums_of(self, own: torch.Tensor) -> torch.Tensor:
        """[K] int64; checksums of each request's tokens up to each one, modulo 2**64; own [K]
        int64."""
        sums = own.cumsum(0)
        before = (sums - own)[self.starts.clamp(max=len(own) - 1)]
        return sums - before[self.requests]

    def refuse(
        self, wrong: torch.Tensor, places: torch.Tensor | None, pool: int, what: str
    ) -> None:
        """
        Args:
            wrong: bool, of any shape.
            places: int64, of that shape; place among the K of each; None: all of them in order.

        Raises:
            RuntimeError: if any is wrong.
        """
        if not wrong.any():
            return
        found = wrong.nonzero()[:, 0] if places is None else places[wrong].unique()
        first = found[0]
        raise RuntimeError(
            f"KV canary: row {int(self.rows[first])}, position {int(self.columns[first])}:"
            f" {what} slot {int(self.slots[first])} of pool {pool};"
            f" {len(found)} positions in all."
        )


@dataclass(frozen=True, slots=True)
class _Paths:
    """The columns that each of the T rows of a batch with `ForwardBatch.ancestors` sees, among the
    P = MAX_TREE_ROWS columns that the bits describe. Requests with more columns after the first of
    these are chains.

    Attributes:
        first: [R] int64; the column of bit 0, and in chains the first that is not read.
        is_in_tree: [T] bool.
        is_seen: [T, P] bool; False in chains.
        is_read: [T, P] bool; seen, and from before the batch.
        places: [T, P] int64; among the K columns.
        before: [T] int64; place of the column before bit 0, below 0 if there is none.
        positions: [T] int64; of each row, after all that it sees.
    """

    first: torch.Tensor
    is_in_tree: torch.Tensor
    is_seen: torch.Tensor
    is_read: torch.Tensor
    places: torch.Tensor
    before: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, ancestors: torch.Tensor, steps: _Columns) -> _Paths:
        requests, own_columns = steps.requests[steps.fed], steps.columns[steps.fed]
        tree_starts = steps.num_read if batch.tree_starts is None else batch.tree_starts
        has_room = batch.kv_lens - tree_starts <= MAX_TREE_ROWS
        first = torch.where(has_room, tree_starts, steps.num_read)
        bits = torch.arange(MAX_TREE_ROWS, device=ancestors.device)
        columns = first[requests][:, None] + bits
        is_in_tree = has_room[requests]
        is_seen = ancestors[: len(requests), None] >> bits & 1 == 1
        is_seen &= (columns <= own_columns[:, None]) & is_in_tree[:, None]
        depths = is_seen.sum(1) - 1
        start = steps.starts[requests]
        return cls(
            first=first,
            is_in_tree=is_in_tree,
            is_seen=is_seen,
            is_read=is_seen & (columns < steps.num_read[requests][:, None]),
            places=(start[:, None] + columns).clamp(max=len(steps.columns) - 1),
            before=torch.where(first[requests] > 0, start + first[requests] - 1, -1),
            positions=torch.where(is_in_tree, first[requests] + depths, own_columns),
        )

    def sums_of(self, own: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """[T, P] int64: the checksum of each row's path up to each column.

        Args:
            own, sums: [K] int64; the part of each column's token, and sums of chains.
        """
        base = torch.where(self.before < 0, 0, sums[self.before])
        return base[:, None] + torch.where(self.is_seen, own[self.places], 0).cumsum(1)


def _mixed(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n] int64; the parts that tokens [n] int32 or int64 at positions [n] int64 add to sums."""
    mixed = (tokens.to(torch.int64) + 1) * _TOKEN_FACTOR ^ (positions + 1) * _POSITION_FACTOR
    return mixed * _TOKEN_FACTOR
