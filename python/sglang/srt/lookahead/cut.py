"""Chooses on the host how many drafts a step verifies, from what it read last: by their worth and
by the cost of rows.

A **draft's score** is the product of the head's probabilities along its chain up to itself, so it
is high if the draft and all before it are probably right. A step of n requests that verifies k
drafts has n + k rows: one certain token of each request, and the drafts.

Where fewer drafts give more tokens per millisecond, the step is packed: it gets the rows of that
many drafts, and the device divides them among the requests by the scores of these very drafts
(`RowPacking`). Where all of them pay, the step is the one that it would be without this.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, compress, zip_longest
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.lookahead.prompt_mix import in_grains
from sglang.srt.lookahead.round_prices import LatencyByKV, MeasuredRoundPrices, StepCase
from sglang.srt.step.price_table import no_graphs
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.worker import HostResult, ScheduleBatch

Floats = NDArray[np.float64]
Scores = NDArray[np.float32]  # see `Confidence.drafts`

LEAST_CHANCE, MOST_CHANCE = 0.01, 0.99  # of a draft, whatever its score is
NUM_BINS = 32
BIN_TRIALS = 256.0  # that each bin remembers
PRIOR_TRIALS = 8.0  # that the score, taken for the chance, counts as in each bin
LEAST_GAIN = 0.01  # share by which fewer drafts must beat all: prices and chances are not exact
GAIN_GRAIN = 128  # rows of prompts are rounded up to multiples of it
SCORE_STEPS = 4  # after this many steps with scores they are read, and chances learnt, anew
LOOK_STEPS = 16  # after this many steps it is computed anew what rounds cost and cutting gains


class Calibration:
    """The chance that a draft and all before it are confirmed, by the draft's score.

    Scores are put in NUM_BINS bins of equal width. Where little was seen a score is its own chance;
    the share confirmed in each bin corrects that, and pooling of neighbours that fall makes it
    monotone (isotonic regression). Old trials are forgotten as new ones come, in each bin apart, so
    that rare scores keep what they have.

    Only drafts that were verified may be told, and their scores alone must decide which those are:
    then the shares are right whichever were left out.
    """

    def __init__(self) -> None:
        # [2, NUM_BINS]; drafts of each bin, and of these the confirmed ones.
        self._tried, self._confirmed = self._counts = np.zeros((2, NUM_BINS))
        self._chances = self._centres = (np.arange(NUM_BINS) + 0.5) / NUM_BINS

    def observe(self, scores: ArrayLike, confirmed: ArrayLike) -> None:
        """Hears of drafts that were verified: [n] scores from 0 to 1, and [n] bool, which of them
        were confirmed, and all before them. All of them count alike."""
        told = np.asarray(scores, np.float64)
        if told.size == 0:
            return
        bins = np.minimum((told * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        bins += NUM_BINS * np.asarray(confirmed, np.bool_)
        found = np.bincount(bins, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)
        found[0] += found[1]
        self._counts += found
        self._counts *= BIN_TRIALS / np.maximum(self._tried, BIN_TRIALS)
        weights = self._tried + PRIOR_TRIALS
        shares = (self._confirmed + PRIOR_TRIALS * self._centres) / weights
        self._chances = np.clip(isotonic(shares, weights), LEAST_CHANCE, MOST_CHANCE)

    def predict(self, scores: ArrayLike) -> Floats:
        """Chances of the same shape; between the centres of bins they are interpolated."""
        return np.interp(np.asarray(scores, np.float64), self._centres, self._chances)


def bounded_scores(values: ArrayLike) -> Floats:
    """The same shape, from 0 to 1: what is no number is 0, as it is on the device."""
    return np.fmin(np.fmax(values, 0.0, dtype=np.float64), 1.0)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """[n]; the values that never fall and are closest to these, by weighted squares: neighbours
    that fall are pooled (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, other_count = pools.pop()
            mean = (other * other_weight + mean * total) / (other_weight + total)
            total, count = total + other_weight, count + other_count
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Milliseconds of rounds by the bucket of rows that they are padded to."""

    rows: tuple[int, ...]  # ascending; room of each bucket, of the last one for all drafts
    costs_ms: tuple[float, ...]  # of each, above 0; a larger bucket may be the cheaper one

    @property
    def most_gain(self) -> float:
        """Share that leaving drafts out could gain at most, were they worth nothing."""
        return self.costs_ms[-1] / min(self.costs_ms) - 1.0


def compute_optimal_k(
    chances: ArrayLike, num_requests: int, table: LatencyTable, least_gain: float = 0.0
) -> int:
    """Returns how many drafts to verify (`best_cut`) of those with such chances, in any order and
    shape, that each and all before it are confirmed."""
    right = expected_right(bounded_scores(chances))
    return best_cut(right, len(right) - 1, num_requests, table, least_gain)[0]


def expected_right(chances: Floats) -> Floats:
    """Returns [1 + n]: how many of the likeliest 0, 1, ... n drafts are right on average, by their
    chances, in any order and shape."""
    sums = np.zeros(1 + chances.size)
    np.sort(chances, axis=None)[::-1].cumsum(out=sums[1:])
    return sums


def best_cut(
    right: Floats, most: int, num_requests: int, table: LatencyTable, least_gain: float = 0.0
) -> tuple[int, float]:
    """Computes how many drafts of all requests to verify for most tokens per millisecond.

    The likeliest drafts are taken first. A draft is never likelier than one before it in its
    chain, so with ties broken by position (`RowDivision`) what is taken of a chain is its
    beginning. A round is expected to give a token of each request, and the drafts that are right.
    Only numbers that fill a bucket are looked at: with fewer drafts it costs the same.

    Args:
        right: see `expected_right`; of any number of drafts, 1 at least.
        most: how many drafts there are, with chances that are distributed as those of `right`.
        least_gain: share by which fewer drafts must beat all of them.

    Returns:
        0 to `most`, of equally good numbers the largest, and its tokens per millisecond divided by
        those of verifying all, 1 or more.
    """
    best, best_rate, rate, whole, count = most, 0.0, 0.0, most, len(right) - 1
    for rows, cost_ms in zip(table.rows, table.costs_ms, strict=True):
        if most and rows >= num_requests:
            whole = rows - num_requests if rows - num_requests < most else most
            place = whole * count / most  # in `right`; it is a line between whole places
            after = ceil(place)
            upper = right.item(after)
            num_right = upper - (after - place) * (upper - right.item(after - 1))
            rate = (num_requests + num_right * most / count) / cost_ms
            if rate >= best_rate:
                best, best_rate = whole, rate
    if best_rate <= rate * (1.0 + least_gain):
        return whole, 1.0
    return best, best_rate / rate


class TileSpec:
    """Cuts steps of drafts to the rows that pay.

    The host does not know the scores of the drafts at hand. It takes them to be distributed as
    those of a step that it read lately, and turns scores into chances by how often drafts of such
    scores were confirmed (`Calibration`); of a tree, those on the confirmed path were.

    It gives prices of rounds (`RoundPrices`) to policies that choose how many drafts there are.
    These divide the tokens of a whole round by its price. A cut round gives fewer tokens in less
    time, so its price is that of the whole round, divided by what cutting gains in tokens per
    millisecond.

    Args:
        rounds: what whole rounds cost.
        packs_in_graphs: packed steps replay graphs. If not, they are priced without.
        fixed: see `RoundOptions.tile_spec_drafts`.
    """

    def __init__(
        self, rounds: MeasuredRoundPrices, packs_in_graphs: bool = True, fixed: float | None = None
    ) -> None:
        self._rounds = self._packed = rounds
        self.spread = rounds.spread
        self._fixed = fixed
        if not packs_in_graphs:
            extend = replace(rounds.head.extend, find=no_graphs)
            target = replace(rounds.target, find=no_graphs)
            self._packed = replace(rounds, target=target, head=replace(rounds.head, extend=extend))
        self._buckets = lru_cache(maxsize=4096)(self._buckets_of)
        self._calibration = Calibration()
        # Steps that it has not heard of: scores of all rows, their rows, drafts fed, tokens, paths.
        self._untold = list[tuple[Scores, ArrayLike, Sequence[int], list[int], list[list[int]]]]()
        self._chances: Floats | None = None  # [D, S], of the drafts of a step read lately
        self._right = dict[int, Floats]()  # by these chances; see `_expected`
        self._lots = random.Random(0)
        self._num_read = self._num_scored = 0  # steps, and those of them with scores
        # By requests, those without drafts, drafts, and rows of prompts; KV changes little since
        # they were looked at last.
        self._known = dict[tuple[int, int, int, int], LatencyTable]()
        self._gains = dict[tuple[int, int, int, int], float]()

    def cut(
        self, batch: ScheduleBatch, counts: StepCounts, num_drafts: Sequence[int]
    ) -> tuple[StepCounts, bool]:
        """Returns the counts of a step with the rows that pay, or those of all drafts, and whether
        their scores are wanted. Called once for each step that has drafts, when all before it have
        been launched."""
        kv_lens = batch.kv_lens_before[batch.num_prompts :]
        num_plain = num_drafts.count(0) - batch.num_prompts  # of those that decode
        case = StepCase(len(kv_lens), sum(kv_lens), num_plain=num_plain)
        prompt_rows = in_grains(sum(batch.num_prompt_tokens))
        table = self.table(case, max(num_drafts), prompt_rows)
        if table.most_gain <= LEAST_GAIN and self._fixed is None:
            return counts, False
        num_cut = sum(num_drafts) - self.num_verified(table, num_drafts, case.num_reqs)
        if num_cut:
            num_rows, num_reqs = counts.num_rows, len(counts.q_lens)
            room = self._room(num_reqs, max(counts.q_lens), num_rows - num_cut)
            if room < num_rows:  # else padding would take the rows
                num_reads = counts.num_reads - (num_rows - room)
                counts = replace(counts, packed=PackedSize(room, num_reads))
        return counts, True

    def table(self, case: StepCase, num_drafts: int, prompt_rows: int = 0) -> LatencyTable:
        """Returns the costs of rounds in which each request that takes drafts has `num_drafts`, 1
        at least, beside rows of prompts; the last bucket is the round that verifies all. KV is that
        of when it was looked up last."""
        key = case.num_reqs, case.num_plain, num_drafts, prompt_rows
        if key in self._known:
            return self._known[key]
        buckets = self._buckets(case.num_reqs, num_drafts, prompt_rows, case.num_plain)
        own_ms, kv_tokens = self._rounds.own_ms, case.kv_tokens
        times = [own_ms(cost, kv_tokens, rows, prompt_rows) for rows, cost in buckets.items()]
        self._known[key] = LatencyTable(tuple(buckets), tuple(times))
        return self._known[key]

    def _buckets_of(
        self, num_reqs: int, num_drafts: int, prompt_rows: int, num_plain: int
    ) -> dict[int, LatencyByKV]:
        """Returns the measured cost of each bucket, by its rows."""
        width, most = 1 + num_drafts, num_reqs + (num_reqs - num_plain) * num_drafts
        sizes = (size - prompt_rows for size in self._packed.target.by_rows)
        least = [num_reqs, *(size for size in sizes if num_reqs < size < most)]
        wholes = (self._packed.fed(num_reqs, width, each, prompt_rows) for each in least)
        rooms = sorted({self._room(*whole) - prompt_rows for whole in wholes})
        prices = {room: self._packed for room in rooms if room < most} | {most: self._rounds}
        return {
            rows: of_rows.cost(num_reqs, num_drafts, rows, prompt_rows, num_plain)
            for rows, of_rows in prices.items()
        }

    def _room(self, num_reqs: int, widest: int, num_rows: int) -> int:
        """Rows that a packed step of `num_rows` rows has room for, as for `PriceTable.find`."""
        key = self._packed.target.find(num_reqs, widest, num_rows)
        return num_rows if key is None else key.num_tokens

    def num_verified(self, table: LatencyTable, num_drafts: Sequence[int], num_decodes: int) -> int:
        """Returns how many of the drafts pay; all while nothing is known of any."""
        most = sum(num_drafts)
        if self._fixed is not None:
            return min(most, round(self._fixed * (len(num_drafts) - num_drafts.count(0))))
        if self._chances is None:
            return most
        return best_cut(self._expected(max(num_drafts)), most, num_decodes, table, LEAST_GAIN)[0]

    def gain(self, case: StepCase, num_drafts: int, prompt_rows: int = 0) -> float:
        """Divides the tokens per millisecond of rounds that verify what pays, of chains of
        `num_drafts`, by those of rounds that verify all; beside these rows of prompts alone."""
        if self._chances is None or num_drafts == 0:
            return 1.0
        key = case.num_reqs, case.num_plain, num_drafts, prompt_rows
        if key not in self._gains:
            table = self.table(case, num_drafts, prompt_rows)
            most = (case.num_reqs - case.num_plain) * num_drafts
            right = self._expected(num_drafts)
            self._gains[key] = best_cut(right, most, case.num_reqs, table, LEAST_GAIN)[1]
        return self._gains[key]

    def round_ms(self, upcoming: StepCase, num_drafts: int) -> float:
        total_ms = 0.0
        for chance, rows in upcoming.prompts:
            whole_ms = self._rounds.beside_ms(upcoming, num_drafts, rows)
            # A few rows of prompts more change the gain little, and it takes long to compute.
            some = -(-rows // GAIN_GRAIN) * GAIN_GRAIN
            total_ms += chance * whole_ms / self.gain(upcoming, num_drafts, some)
        return total_ms

    def _expected(self, longest: int) -> Floats:
        """See `expected_right`; of the first `longest` drafts of the chains that were read."""
        if longest not in self._right:
            assert self._chances is not None, "Scores were read."
            self._right[longest] = expected_right(self._chances[:, :longest])
        return self._right[longest]

    def observe(self, record: StepRecord, result: HostResult) -> list[int]:
        """Learns from a step, cut or whole. Returns R counts of tokens that requests accepted, or
        would have accepted uncut: if all drafts that a cut chain fed were right, its other drafts
        are drawn at random, each right with its chance given those before it. Otherwise a policy
        would take drafts that were cut for wrong ones, or learn from likely drafts alone. Trees are
        not continued: policies of trees go by paths."""
        self._num_read += 1
        if self._num_read % LOOK_STEPS == 0:
            self._known, self._gains = {}, {}
        num_drafts, taken = record.plan.num_drafts, result.accept_lens
        accepted = [count or 1 for count in taken]
        if record.scores is None:  # others were copied before the step ran: nothing is waited for
            return accepted
        scores, rows = record.scores.read()[0].numpy(), record.rows
        if result.num_drafts and not result.paths:
            self._continue(accepted, result.num_drafts, record, scores)
        self._untold.append((scores, rows, result.num_drafts or num_drafts, taken, result.paths))
        if self._num_scored % SCORE_STEPS == 0:
            self._learn()
            chains = scores.take([*compress(rows, num_drafts)], 0)[:, : max(num_drafts)]
            told = extended(bounded_scores(chains).cumprod(1), scores.shape[1])
            self._chances, self._right = self._calibration.predict(told), {}
        self._num_scored += 1
        return accepted

    def _learn(self) -> None:
        """Tells the calibration which drafts were right in the steps that it has not heard of."""
        scores, rows, *numbers, paths = zip(*self._untold, strict=True)
        self._untold = []
        fed, taken = (np.fromiter(chain.from_iterable(each), np.int64)[:, None] for each in numbers)
        places = np.arange(1, 1 + fed.max())
        chains = np.concatenate(
            [of_step.take(of, 0) for of_step, of in zip(scores, rows, strict=True)]
        )
        told = bounded_scores(chains[:, : len(places)]).cumprod(axis=1)
        was_fed, confirmed = places <= fed, places < taken
        if paths[0]:  # of trees, whose draft j is node j + 1, in the order of scores
            nodes = np.array([*zip_longest(*chain.from_iterable(paths), fillvalue=0)]).T
            on_path = np.where(np.arange(nodes.shape[1]) < taken, nodes, 0)
            is_right = np.zeros((len(fed), 1 + len(places)), np.bool_)
            np.put_along_axis(is_right, on_path, True, axis=1)
            confirmed = is_right[:, 1:]
        self._calibration.observe(told[was_fed], confirmed[was_fed])

    def _continue(
        self, accepted: list[int], fed: Sequence[int], record: StepRecord, scores: Scores
    ) -> None:
        """Adds to counts of accepted tokens the drafts of cut chains that would be right."""
        num_drafts, rows = record.plan.num_drafts, record.rows
        cut = [index for index, n in enumerate(fed) if accepted[index] > n < num_drafts[index]]
        if not cut:
            return
        chains = scores.take([rows[index] for index in cut], 0)[:, : max(num_drafts)]
        told, draw = bounded_scores(chains).cumprod(axis=1), self._lots.random
        chances = self._calibration.predict(told) * (told > 0)  # of a score of 0 there is no draft
        for index, of_chain in zip(cut, chances.tolist(), strict=True):
            start = fed[index]
            before = of_chain[start - 1] if start else 1.0
            for chance in of_chain[start : num_drafts[index]]:
                if not chance or draw() * before >= chance:
                    break
                before = chance
                accepted[index] += 1


def extended(scores: Floats, longest: int) -> Floats:
    """Returns [D, longest], from scores [D, S] with D and S at least 1 and S `longest` at most:
    chains that are shorter are thought of as going on like their last draft."""
    lacking = longest - scores.shape[1]
    if lacking:
        before = scores[:, -2].sum() if scores.shape[1] > 1 else len(scores)
        survival = scores[:, -1].sum() / before if before > 0 else PRIOR_CONFIDENCE
        further = survival ** np.arange(1, lacking + 1)
        scores = np.concatenate((scores, scores[:, -1:] * further), axis=1)
    return scores
