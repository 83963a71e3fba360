"""How many rows a step of drafts gets, chosen on the host from what it read last.

The head has drafted a chain of the same length for each request. Where fewer drafts give more
tokens per millisecond, the step is packed: it gets the rows of so many drafts, and the device
divides them among the requests by the scores of these very drafts (`RowPacking`). Where all of them
pay, the step is the one that it would be without this.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.speculative.drafter import RowPlan
from sglang.srt.speculative.round_prices import MeasuredRounds, UpcomingRound
from sglang.srt.speculative.tile_spec.core import (
    Calibration,
    Floats,
    LatencyTable,
    compute_optimal_k,
)
from sglang.srt.step.price_table import PriceTable, no_graphs
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import HostResult, ScheduleBatch

LEAST_GAIN = 0.01  # share by which fewer drafts must beat all: prices and chances are not exact
MAX_KEPT_TABLES = 4096


class RoundTables:
    """What rounds cost by rows, for any number of requests and drafts.

    Args:
        rounds: prices of rounds.
        packs_in_graphs: packed steps replay graphs. If not, they are priced without.
    """

    def __init__(self, rounds: MeasuredRounds, packs_in_graphs: bool) -> None:
        self._uniform = self._packed = rounds
        if not packs_in_graphs:
            head = replace(rounds.head, extend=_without_graphs(rounds.head.extend))
            self._packed = MeasuredRounds(_without_graphs(rounds.target), head)
        self._sizes = self._packed.target.sizes
        self._kept: dict[tuple[int, int], _Buckets] = {}

    def table(self, upcoming: UpcomingRound, num_drafts: int) -> LatencyTable:
        """Of rounds in which each request has so many drafts, 1 at least; its last bucket is the
        round that verifies all of them."""
        key = upcoming.num_reqs, num_drafts
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT_TABLES:
                self._kept.clear()
            self._kept[key] = self._buckets(*key)
        buckets = self._kept[key]
        costs_ms = buckets.rows_ms + buckets.kv_ms * upcoming.kv_tokens
        return LatencyTable(buckets.rows, tuple(costs_ms.tolist()))

    def room(self, num_reqs: int, widest: int, num_rows: int) -> int:
        """Rows that a packed step of so many has room for; arguments as for `PriceTable.find`."""
        key = self._packed.target.find(num_reqs, widest, num_rows)
        return num_rows if key is None else key.num_tokens

    def _buckets(self, num_reqs: int, num_drafts: int) -> _Buckets:
        width = 1 + num_drafts
        most = num_reqs * width
        least = [num_reqs, *(size for size in self._sizes if num_reqs < size < most)]
        rooms = {self.room(num_reqs, width, num_rows) for num_rows in least}
        rows = sorted(room for room in rooms if room < most)
        costs = [self._packed.cost(num_reqs, num_drafts, each) for each in rows]
        costs.append(self._uniform.cost(num_reqs, num_drafts, most))
        return _Buckets(
            (*rows, most),
            np.array([cost.rows_ms for cost in costs]),
            np.array([cost.kv_ms for cost in costs]),
        )


@dataclass(frozen=True, slots=True)
class _Buckets:
    """A `LatencyTable` before KV is known: milliseconds without, and of each token of it."""

    rows: tuple[int, ...]
    rows_ms: Floats
    kv_ms: Floats


def _without_graphs(prices: PriceTable) -> PriceTable:
    return replace(prices, find=no_graphs)


class _Proposed:
    """Chains that wait for the next step, with their scores on the way to the host.

    Args:
        rows: of the page table, of the D requests that have one each.
        scores: [D, S] float32; nobody else may write to its memory.
    """

    def __init__(self, rows: Sequence[int], scores: torch.Tensor) -> None:
        self.places = {row: place for place, row in enumerate(rows)}
        self._copy = HostCopy([scores])

    def read(self) -> Floats:
        """[D, S]."""
        return np.asarray(self._copy.read()[0].numpy(), np.float64)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that has not been read: the drafts that its requests had, fed or not, and their
    scores, if they were asked for."""

    rows: list[int]
    num_drafts: list[int]
    proposed: _Proposed | None


class TileSpec:
    """Cuts steps of drafts to the rows that pay.

    What it goes by is one round old: the scores of the last step that was read, whose distribution
    is taken for that of the drafts at hand, and how often drafts of such scores were confirmed.

    Args:
        tables: what rounds cost.
        least_gain: see `compute_optimal_k`.
    """

    def __init__(self, tables: RoundTables, least_gain: float = LEAST_GAIN) -> None:
        self._tables = tables
        self._least_gain = least_gain
        self._calibration = Calibration()
        self._scores: Floats | None = None  # [D, S], of the last step read that had any
        self._proposed: _Proposed | None = None  # for the step that is planned next
        self._launched = deque[_Launched]()
        self._lots = random.Random(0)

    def wants_scores(self, upcoming: UpcomingRound, num_drafts: int) -> bool:
        """Whether fewer than so many drafts of each request could pay at all. Where rows cost next
        to nothing they cannot, and then nothing is copied from the device."""
        return self._tables.table(upcoming, num_drafts).most_gain > self._least_gain

    def proposed(
        self, rows: Sequence[int], kv_len_upper_bounds: Sequence[int], scores: torch.Tensor
    ) -> None:
        """Hears what is proposed for the next step; rows and scores as for `_Proposed`.

        Args:
            kv_len_upper_bounds: of the D requests.
        """
        upcoming = UpcomingRound(len(rows), sum(kv_len_upper_bounds))
        if self.wants_scores(upcoming, scores.shape[1]):
            self._proposed = _Proposed(rows, scores)

    def cut(self, batch: ScheduleBatch, num_drafts: list[int], plan: RowPlan) -> RowPlan:
        """The step with the rows that pay, or as it is planned. Called once for each step.

        Args:
            num_drafts: R counts of drafts that requests have, 0 where a prompt is fed.
            plan: feeds all of them.
        """
        proposed, self._proposed = self._proposed, None
        has_drafts = [row for row, count in zip(batch.rows, num_drafts, strict=True) if count]
        if proposed is not None and not proposed.places.keys() >= {*has_drafts}:
            proposed = None  # drafts of an earlier step are among them
        self._launched.append(_Launched(batch.rows, num_drafts, proposed))
        if proposed is None or not has_drafts:
            return plan
        most = sum(num_drafts)
        num_verified = self.num_verified(batch, num_drafts)
        if num_verified < most:
            spare = self._spare_rows(plan, most - num_verified)
            num_verified = min(most, num_verified + spare)
        return plan if num_verified == most else _packed(plan, most - num_verified)

    def num_verified(self, batch: ScheduleBatch, num_drafts: list[int]) -> int:
        """How many of the drafts pay. Beside prompts as many as in a step without them: the time
        that their rows take is spent in any case."""
        most, longest = sum(num_drafts), max(num_drafts)
        if self._scores is None:
            return most
        decodes = [
            bound - reserved
            for bound, reserved, num_prompt in zip(
                batch.kv_len_upper_bounds, batch.max_q_lens, batch.num_prompt_tokens, strict=True
            )
            if num_prompt == 0
        ]
        upcoming = UpcomingRound(len(decodes), sum(decodes))
        table = self._tables.table(upcoming, longest)
        chances = self._calibration.predict(resampled(self._scores, longest, most))
        return compute_optimal_k(chances, len(decodes), table, self._least_gain)

    def _spare_rows(self, plan: RowPlan, num_cut: int) -> int:
        """Rows that padding would take if so many drafts were cut."""
        q_lens = plan.counts.q_lens
        num_rows = sum(q_lens) - num_cut
        return self._tables.room(len(q_lens), max(q_lens), num_rows) - num_rows

    def observe(self, result: HostResult) -> list[tuple[int, int]]:
        """Hears the result of the oldest step that it has not heard of.

        Returns:
            Of each request that had drafts, how many, and how many of them were right. A chain that
            was cut, and was right as far as it was fed, is continued by lot: each further draft is
            right with its chance, given those before it. So whoever learns from this how good
            drafts are takes no cut draft for a wrong one, nor learns from the likely ones alone.
        """
        launched = self._launched.popleft()
        chances = np.empty((0, 0))
        if launched.proposed is not None:
            self._scores = launched.proposed.read()
            chances = self._calibration.predict(self._scores)
            self._calibrate(launched, launched.proposed, result)
        verified = []
        fed = result.num_drafts or launched.num_drafts
        for index, count in enumerate(launched.num_drafts):
            if count == 0:
                continue
            num_right = result.accept_lens[index] - 1
            if num_right == fed[index] < count:
                assert launched.proposed is not None, "A step is cut by scores."
                chain = chances[launched.proposed.places[launched.rows[index]]]
                num_right = self._continued(chain[:count], num_right)
            verified.append((count, num_right))
        return verified

    def _continued(self, chain: Floats, num_right: int) -> int:
        """Drafts of a chain that are right, if the first so many are; chain [S] of chances."""
        while num_right < len(chain):
            before = chain[num_right - 1] if num_right else 1.0
            if self._lots.random() * before >= chain[num_right]:
                break
            num_right += 1
        return num_right

    def _calibrate(self, launched: _Launched, proposed: _Proposed, result: HostResult) -> None:
        """Tells which of the drafts that were fed were confirmed, and all before them."""
        if not result.num_drafts or self._scores is None:
            return
        told = [
            (proposed.places[row], fed, accepted - 1)
            for row, fed, accepted in zip(
                launched.rows, result.num_drafts, result.accept_lens, strict=True
            )
            if fed
        ]
        if not told:
            return
        places, fed, confirmed = np.array(told).T
        scores = self._scores[places]
        position = np.arange(scores.shape[1])
        was_fed = position < fed[:, None]
        was_confirmed = position < confirmed[:, None]
        self._calibration.observe(scores[was_fed], was_confirmed[was_fed])


def resampled(scores: Floats, longest: int, count: int) -> Floats:
    """[count]; scores that are distributed as those of the first `longest` drafts of each chain.
    Chains that are shorter are thought of as going on.

    Args:
        scores: [D, S], D and S at least 1.
        count: at least 1.
    """
    lacking = longest - scores.shape[1]
    if lacking > 0:
        further = PRIOR_CONFIDENCE ** np.arange(1, lacking + 1)
        scores = np.concatenate((scores, scores[:, -1:] * further), axis=1)
    ordered = np.sort(scores[:, :longest], axis=None)
    return ordered[((np.arange(count) + 0.5) * (ordered.size / count)).astype(np.int64)]


def _packed(plan: RowPlan, num_cut: int) -> RowPlan:
    """The plan with so many drafts less; the device decides which."""
    counts = plan.counts
    size = PackedSize(counts.num_rows - num_cut, counts.num_reads - num_cut)
    return replace(plan, counts=replace(counts, packed=size))
