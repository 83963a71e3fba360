"""Tables of rounds, and what is learnt from steps of which drafts were cut."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.cut import LatencyTable
from sglang.srt.lookahead.draft_rows import plan_of_drafts
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.lookahead.tile_spec import (
    LOOK_STEPS,
    CutRoundPrices,
    LatencyTables,
    TileSpec,
    resampled,
)
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.price_table import Curve, DraftPrices, PriceTable
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import HostResult, ScheduleBatch
from tile_spec_decode import batch_of, record_of
from tile_spec_rounds import DEAR_ROWS, FREE_DRAFTS, FREE_ROWS, prices_of

FREE = Curve((1, 1 << 20), (0.0, 0.0))
DEPTH = 3


def with_graphs(support: GraphSupport, max_requests: int = 64) -> MeasuredRoundPrices:
    """A graph's price is its rows, but for those of 192 rows, which cost as 96; eager steps are
    dearer. The head costs a tenth."""
    keys = GraphKeys(support, max_requests, 1 + DEPTH, 0)

    def table(scale: float) -> PriceTable:
        costs = {key: scale * (96 if key.num_tokens == 192 else key.num_tokens) for key in keys.all}
        eager = Curve((1, 1024), (scale * 1000, scale * 2023))
        return PriceTable(keys.find_shape, costs, eager, FREE, 1e-6, 1e-7)

    return MeasuredRoundPrices(table(1.0), DraftPrices(table(0.1), {1: FREE, 2: FREE}))


def test_buckets_are_the_graphs_that_a_step_may_replay() -> None:
    tables = LatencyTables(with_graphs(GraphSupport.RAGGED_Q), packs_in_graphs=True)
    found = tables.table(StepCase(64), DEPTH)
    assert found.rows == (96, 128, 160, 192, 224, 256)
    assert found.costs_ms == pytest.approx([1.1 * rows for rows in (96, 128, 160, 96, 224, 256)])
    few = tables.table(StepCase(5), 1)
    assert few.rows[-1] == 10, "all drafts, whatever room the graph has"
    assert few.most_gain == 0.0, "one graph serves any number of them"


def test_each_token_of_kv_is_priced_by_how_many_rows_see_it() -> None:
    tables = LatencyTables(with_graphs(GraphSupport.RAGGED_Q), packs_in_graphs=True)
    without, with_kv = (tables.table(StepCase(64, kv), DEPTH) for kv in (0, 64_000))
    more = np.subtract(with_kv.costs_ms, without.costs_ms)
    # The target and the head over so many rows, then two draft steps over one row of each request.
    each = [2 * (1e-6 + 1e-7 * rows / 64) + 2 * (1e-6 + 1e-7) for rows in without.rows]
    assert more == pytest.approx([64_000 * kv_ms for kv_ms in each])
    assert all(fewer < more for fewer, more in pairwise(more.tolist()))


def test_where_packed_steps_replay_no_graph_they_are_priced_without() -> None:
    """Uniform graphs serve steps of all drafts alone."""
    tables = LatencyTables(with_graphs(GraphSupport.UNIFORM_Q), packs_in_graphs=False)
    found = tables.table(StepCase(64), DEPTH)
    assert found.costs_ms[-1] == pytest.approx(1.1 * 256)
    assert min(found.costs_ms[:-1]) > 1000
    assert found.most_gain == 0.0


def test_resampled_scores_are_distributed_as_those_read() -> None:
    rng = np.random.default_rng(0)
    scores = np.cumprod(rng.random((40, DEPTH)), axis=1)
    assert sorted(resampled(scores, DEPTH, 120)) == sorted(scores.flatten())
    for longest, count in ((1, 7), (2, 200), (5, 333)):
        found = resampled(scores, longest, count)
        assert found.shape == (count,)
        if longest <= DEPTH:
            assert abs(found.mean() - scores[:, :longest].mean()) < 0.03
        else:
            assert found.mean() < scores.mean()


class Cutting:
    """Has `TileSpec` cut steps of requests of these confidences, and hear of them."""

    def __init__(self, rounds: MeasuredRoundPrices, confidence: float = 0.5) -> None:
        self.tile_spec = TileSpec(LatencyTables(rounds, packs_in_graphs=True))
        self.confidence = torch.full((64, DEPTH), confidence)

    def cut(self, num_drafts: Sequence[int], num_prompts: int = 0) -> StepPlan:
        batch = batch_of(num_drafts, num_prompts)
        plan = plan_of_drafts(batch, [*([0] * num_prompts), *num_drafts])
        return self.note(batch, self.tile_spec.cut(batch, plan))

    def note(self, batch: ScheduleBatch, plan: StepPlan) -> StepPlan:
        self._record = record_of(batch, plan, self.confidence)
        return plan

    def observe(self, result: HostResult) -> list[tuple[int, int]]:
        """Returns of each request with drafts how many, and how many of them were right."""
        found = zip(self._record.plan.num_drafts, self._accepted(result), strict=True)
        return [(count, taken - 1) for count, taken in found if count]

    def _accepted(self, result: HostResult) -> list[int]:
        return self.tile_spec.observe(self._record, result)


def result_of(fed: Sequence[int], right: Sequence[int]) -> HostResult:
    taken = [1 + count for count in right]
    return HostResult([[]] * len(taken), taken, taken, num_drafts=list(fed))


def test_a_step_is_cut_to_the_rows_of_a_graph_once_scores_are_known() -> None:
    cutting = Cutting(with_graphs(GraphSupport.RAGGED_Q))
    assert cutting.cut([DEPTH] * 64).counts.packed is None
    cutting.observe(result_of([DEPTH] * 64, [1] * 64))
    plan = cutting.cut([DEPTH] * 64)
    assert plan.counts.packed == PackedSize(192, 192), "as cheap as 96 rows"
    assert plan.max_accepted == 1 + DEPTH


def test_beside_prompts_as_many_drafts_are_verified_and_prompts_are_fed_whole() -> None:
    cutting = Cutting(MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS), 0.05)
    cutting.cut([DEPTH] * 4)
    cutting.observe(result_of([DEPTH] * 4, [0] * 4))
    plan = cutting.cut([DEPTH] * 4, num_prompts=2)
    assert plan.counts.packed == PackedSize(2 * 10 + 4, 2 + 4)


def test_a_step_whose_drafts_all_pay_is_the_one_that_was_planned() -> None:
    """Any prices, any scores, looked at or not; prompts beside it or none."""
    chooser, whole = random.Random(0), Counter[bool]()
    for _ in range(60):
        costs = [1.0, *sorted(1 + chooser.random() * chooser.choice([0.02, 3]) for _ in range(3))]
        cutting = Cutting(MeasuredRoundPrices(prices_of((1, 20, 60, 300), costs), FREE_DRAFTS))
        num_reqs, num_prompts = chooser.choice([1, 2, 8, 48]), chooser.choice([0, 0, 2])
        counts = [0] * num_prompts + [DEPTH] * num_reqs
        for _ in range(3):
            cutting.confidence.fill_(chooser.choice([0.01, 0.9, 1.0]))
            batch = batch_of([DEPTH] * num_reqs, num_prompts)
            planned = plan_of_drafts(batch, counts)
            plan = cutting.note(batch, cutting.tile_spec.cut(batch, planned))
            is_whole = plan.counts.packed is None
            fewer = is_whole or plan.counts.packed.num_rows < planned.counts.num_rows
            assert plan.counts == planned.counts if is_whole else fewer
            looked = plan.wants_scores
            whole[is_whole and looked] += 1
            result = [0] * num_prompts + [chooser.choice([0, DEPTH])] * num_reqs
            cutting.observe(result_of(counts, result))
    assert min(whole.values()) > 20, "some looked at scores and verify all"


def test_where_rows_are_free_nothing_is_copied_and_nothing_is_cut() -> None:
    cutting = Cutting(MeasuredRoundPrices(FREE_ROWS, FREE_DRAFTS), 0.0)
    for _ in range(3):
        plan = cutting.cut([DEPTH] * 4)
        assert plan.counts.packed is None
        assert not plan.wants_scores
        found = cutting.observe(result_of([DEPTH] * 4, [0, 1, 2, 3]))
        assert found == [(DEPTH, 0), (DEPTH, 1), (DEPTH, 2), (DEPTH, 3)]


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0])
def test_a_confidence_that_is_no_share_counts_as_0(value: float) -> None:
    """Of one request; the device takes it for 0 too."""
    plans, told = [], []
    for each in (0.0, value):
        cutting = Cutting(MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS))
        cutting.confidence[1] = each
        for _ in range(3):
            plans.append(cutting.cut([DEPTH] * 4).counts)
            told.append(cutting.observe(result_of([DEPTH, 0, 1, DEPTH], [1, 0, 1, 0])))
        plans.append(cutting.tile_spec.gain(StepCase(4), DEPTH))
    assert plans[:4] == plans[4:]
    assert told[:3] == told[3:]


def test_steps_of_requests_without_drafts_say_nothing() -> None:
    cutting = Cutting(MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS))
    assert cutting.cut([0, 0]).is_plain
    assert cutting.observe(HostResult([[1], [2]], [1, 1], [1, 1])) == []


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_who_learns_from_cut_steps_learns_what_uncut_ones_would_have_told(chance: float) -> None:
    """Drafts are right with the chance that the head says; any number of each chain is fed."""
    luck = random.Random(5)
    cutting = Cutting(MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS), chance)
    told = np.zeros(1 + DEPTH)
    for _ in range(400):
        cutting.cut([DEPTH] * 8)
        fed = [luck.randint(0, DEPTH) for _ in range(8)]
        whole = [next(i for i in range(9) if i == DEPTH or luck.random() >= chance) for _ in fed]
        right = [min(count, most) for count, most in zip(whole, fed, strict=True)]
        for count, num_right in cutting.observe(result_of(fed, right)):
            assert count == DEPTH
            told[num_right] += 1
    expected = [chance**n * (1 - chance * (n < DEPTH)) for n in range(1 + DEPTH)]
    expected[DEPTH] = chance**DEPTH
    assert told / told.sum() == pytest.approx(expected, abs=0.04)


def test_what_cutting_gains_is_heard_once_scores_are_known_and_every_few_steps() -> None:
    rounds = MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS)
    cutting = Cutting(rounds)
    cut_rounds, upcoming, found = CutRoundPrices(rounds, cutting.tile_spec), StepCase(4), []
    for _ in range(2 * LOOK_STEPS):
        found.append(cut_rounds.round_ms(upcoming, DEPTH))
        assert cut_rounds.round_ms(upcoming, DEPTH) == found[-1]
        cutting.cut([DEPTH] * 4)
        cutting.observe(result_of([DEPTH] * 4, [0] * 4))
    assert found[0] == rounds.round_ms(upcoming, DEPTH) > found[1]
    assert [*map(len, (set(found[1:LOOK_STEPS]), set(found)))] == [1, 3]


def test_a_table_has_a_price_for_each_bucket() -> None:
    for rows, costs in (((), ()), ((1,), (1.0, 2.0)), ((1,), (0.0,))):
        with pytest.raises(AssertionError):
            LatencyTable(rows, costs)
