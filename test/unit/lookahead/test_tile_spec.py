"""Checks what TileSpec cuts of steps and what it learns from them, of chains and of trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead import cut as cut_module
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.lookahead.cut import (
    LOOK_STEPS,
    Calibration,
    TileSpec,
    ordered_scores,
    resampled,
)
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import HostResult, ScheduleBatch
from tile_spec_decode import batch_of, cut_plan, record_of
from tile_spec_rounds import DEAR_ROWS, FREE_DRAFTS, FREE_PASS, prices_of

FREE = Curve((1, 1 << 20), (0.0, 0.0))
DEPTH = 3
DEAR = MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS)


def with_graphs(support: GraphSupport, max_requests: int = 64) -> MeasuredRoundPrices:
    """A graph's price is its rows, but for those of 192 rows, which cost as 96; eager steps are
    dearer. The head costs a tenth."""
    keys = GraphKeys(support, max_requests, 1 + DEPTH, 0)

    def table(scale: float) -> PriceTable:
        costs = {key: scale * (96 if key.num_tokens == 192 else key.num_tokens) for key in keys.all}
        eager = Curve((1, 1024), (scale * 1000, scale * 2023))
        return PriceTable(keys.find_shape, costs, eager, FREE, 1e-6, 1e-7)

    return MeasuredRoundPrices(
        table(1.0), DraftPrices(table(0.1), {n: PassPrices(FREE, n * 1.1e-6) for n in (1, 2)})
    )


def test_tables_have_the_graphs_that_a_step_may_replay_and_what_their_rows_see() -> None:
    """Each token of KV is read by the target and the head over so many rows, then by two draft
    steps over one row of each request. Uniform graphs serve steps of all drafts alone."""
    rounds, kv_tokens = with_graphs(GraphSupport.RAGGED_Q), 64_000
    tables = TileSpec(rounds, packs_in_graphs=True)
    without, with_kv = (tables.table(StepCase(64, kv), DEPTH) for kv in (0, kv_tokens))
    assert without.rows == (96, 128, 160, 192, 224, 256)
    assert without.costs_ms == pytest.approx([1.1 * rows for rows in (96, 128, 160, 96, 224, 256)])
    each = [2 * (1e-6 + 1e-7 * rows / 64) + 2 * (1e-6 + 1e-7) for rows in without.rows]
    more = np.subtract(with_kv.costs_ms, without.costs_ms)
    assert more == pytest.approx([kv_tokens * kv_ms for kv_ms in each])
    few = tables.table(StepCase(5), 1)
    assert few.rows[-1] == 10, "all drafts, whatever room the graph has"
    assert few.most_gain == 0.0, "one graph serves any number of them"
    launched = TileSpec(with_graphs(GraphSupport.UNIFORM_Q), packs_in_graphs=False)
    found = launched.table(StepCase(64), DEPTH)
    assert found.costs_ms[-1] == pytest.approx(1.1 * 256)
    assert min(found.costs_ms[:-1]) > 1000
    assert found.most_gain == 0.0


def test_resampled_scores_are_distributed_as_those_read() -> None:
    rng = np.random.default_rng(0)
    scores = np.cumprod(rng.random((40, DEPTH)), axis=1)
    ordered = ordered_scores(scores, DEPTH)
    assert ordered.tolist() == resampled(ordered, ordered.size).tolist() == sorted(scores.flatten())
    for longest, count in ((1, 7), (2, 200), (5, 333)):
        found = resampled(ordered_scores(scores, longest), count)
        assert found.shape == (count,)
        if longest <= DEPTH:
            assert abs(found.mean() - scores[:, :longest].mean()) < 0.03
        else:
            assert found.mean() < scores.mean()
    chain = np.array([[0.5, 0.25]] * 3)
    assert resampled(ordered_scores(chain, 4), 4).tolist() == [0.0625, 0.125, 0.25, 0.5], (
        "it goes on alike"
    )


def test_a_fixed_number_of_drafts_is_verified_and_what_padding_has_room_for() -> None:
    tile_spec = TileSpec(with_graphs(GraphSupport.RAGGED_Q), fixed=1.1)
    batch = batch_of([DEPTH] * 64)
    plan = cut_plan(tile_spec, batch, [DEPTH] * 64)
    assert plan.counts.packed == PackedSize(160, 160), "134 rows replay a graph of 160"


class Cutting:
    """Has `TileSpec` cut steps of requests of these confidences, and hear of them."""

    def __init__(self, rounds: MeasuredRoundPrices, confidence: float = 0.5) -> None:
        self.tile_spec = TileSpec(rounds)
        self.confidence = torch.full((64, DEPTH), confidence)

    def cut(self, num_drafts: Sequence[int], num_prompts: int = 0) -> StepPlan:
        batch = batch_of(num_drafts, num_prompts)
        return self.note(batch, cut_plan(self.tile_spec, batch, [0] * num_prompts + [*num_drafts]))

    def note(self, batch: ScheduleBatch, plan: StepPlan) -> StepPlan:
        self.record = record_of(batch, plan, self.confidence)
        return plan

    def observe(self, result: HostResult) -> list[tuple[int, int]]:
        """Returns of each request with drafts how many, and how many of them were right."""
        found = zip(self.record.plan.num_drafts, self._accepted(result), strict=True)
        return [(count, taken - 1) for count, taken in found if count]

    def _accepted(self, result: HostResult) -> list[int]:
        return self.tile_spec.observe(self.record, result)


def result_of(fed: Sequence[int], right: Sequence[int]) -> HostResult:
    taken = [1 + count for count in right]
    return HostResult([[]] * len(taken), taken, taken, num_drafts=list(fed))


def test_scores_are_renewed_if_only_every_second_step_has_drafts() -> None:
    rows = prices_of((64, 64 * (1 + DEPTH)), (10.0, 13.0))  # a draft pays if its chance is over 0.1
    cutting, sizes = Cutting(MeasuredRoundPrices(rows, FREE_DRAFTS)), list[int]()
    for confidence, num_right in ((0.05, 0), (0.95, DEPTH)):
        cutting.confidence.fill_(confidence)
        for _ in range(40):
            plan = cutting.cut([DEPTH] * 64)
            cutting.observe(result_of(plan.num_drafts, [num_right] * 64))
            without = replace(cutting.record, scores=None)
            cutting.tile_spec.observe(without, result_of([0] * 64, [0] * 64))
        packed = cutting.cut([DEPTH] * 64).counts.packed
        sizes.append(64 * (1 + DEPTH) if packed is None else packed.num_rows)
    assert sizes[0] < sizes[1]


def test_beside_prompts_as_many_drafts_are_verified_and_prompts_are_fed_whole() -> None:
    cutting = Cutting(MeasuredRoundPrices(DEAR_ROWS, FREE_DRAFTS), 0.05)
    cutting.cut([DEPTH] * 4)
    cutting.observe(result_of([DEPTH] * 4, [0] * 4))
    plan = cutting.cut([DEPTH] * 4, num_prompts=2)
    assert plan.counts.packed == PackedSize(2 * 10 + 4, 2 + 4)
    rows = prices_of((1, 20, 300), (1.0, 20.0, 20.1))  # beside 20 rows of prompts, more are free
    cutting = Cutting(MeasuredRoundPrices(rows, FREE_DRAFTS), 0.05)
    cutting.cut([DEPTH] * 4)
    cutting.observe(result_of([DEPTH] * 4, [0] * 4))
    assert cutting.cut([DEPTH] * 4).counts.packed == PackedSize(4, 4)
    assert cutting.cut([DEPTH] * 4, num_prompts=2).counts.packed is None


@pytest.mark.parametrize("num_plain", [0, 60])
def test_requests_that_take_no_drafts_have_rows_in_what_is_cut(num_plain: int) -> None:
    """A cut gains what rows of wrong drafts cost, of those who have any."""
    cutting, num_drafting = Cutting(DEAR, 0.0), 4
    cutting.confidence[num_drafting:] = 0.9  # of drafts that nobody takes
    for _ in range(40):
        plan = cutting.cut([DEPTH] * num_drafting + [0] * num_plain)
        right = [0] * (num_drafting + num_plain)
        cutting.observe(result_of([DEPTH] * num_drafting + [0] * num_plain, right))
    num_reqs = num_drafting + num_plain
    assert plan.counts.packed == PackedSize(num_reqs, num_reqs)
    case = StepCase(num_reqs, num_plain=num_plain)
    gain = cutting.tile_spec.gain(case, DEPTH)
    # A draft's chance is thought to be 1 of 100 at least.
    tokens = num_reqs / (num_reqs + 0.01 * num_drafting * DEPTH)
    whole = num_reqs + num_drafting * DEPTH
    assert gain == pytest.approx(tokens * whole / num_reqs, rel=0.02)


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
    cut_rounds, upcoming, found = cutting.tile_spec, StepCase(4), []
    for _ in range(2 * LOOK_STEPS):
        found.append(cut_rounds.round_ms(upcoming, DEPTH))
        assert cut_rounds.round_ms(upcoming, DEPTH) == found[-1]
        cutting.cut([DEPTH] * 4)
        cutting.observe(result_of([DEPTH] * 4, [0] * 4))
    assert found[0] == rounds.round_ms(upcoming, DEPTH) > found[1]
    assert [*map(len, (set(found[1:LOOK_STEPS]), set(found)))] == [1, 3]


# ---------------------------------------------------------------- trees


class Tree(NamedTuple):
    """Nodes 1 to D in descending order of their scores.

    Attributes:
        scores: [D]; what the head says of the path to each.
        parents: [D]
        told: [D]; what it says of each, if its parent is right.
    """

    scores: list[float]
    parents: list[int]
    told: list[float]


def random_tree(luck: random.Random, topk: int, num_drafts: int) -> Tree:
    """The best of three levels. What is said of siblings sums up to less than 1."""
    nodes = list[tuple[float, int, float]]()  # score, place of the parent, what is said
    level = [(-1, 1.0)]
    for _ in range(3):
        below = list[tuple[int, float]]()
        for parent, score in level:
            shares = sorted((luck.random() for _ in range(topk + 1)), reverse=True)
            for share in shares[:topk]:
                told = share / sum(shares)
                below.append((len(nodes), score * told))
                nodes.append((score * told, parent, told))
        level = below
    order = sorted(range(len(nodes)), key=lambda place: (-nodes[place][0], place))[:num_drafts]
    node_of = {-1: 0} | {place: 1 + i for i, place in enumerate(order)}
    chosen = [nodes[place] for place in order]
    return Tree([n[0] for n in chosen], [node_of[n[1]] for n in chosen], [n[2] for n in chosen])


def confirmed_path(tree: Tree, num_fed: int, power: float, luck: random.Random) -> list[int]:
    """From the root on: each draft is right with what the head says of it to this power."""
    path = [0]
    while True:
        lot = luck.random()
        for node in range(1, 1 + num_fed):
            if tree.parents[node - 1] == path[-1]:
                lot -= tree.told[node - 1] ** power
                if lot < 0:
                    path.append(node)
                    break
        else:
            return path


def confidence_of(trees: Sequence[Tree]) -> torch.Tensor:
    """[R, D] float32; see `Confidence.drafts`."""
    scores = torch.tensor([tree.scores for tree in trees])
    return scores / torch.nn.functional.pad(scores[:, :-1], (1, 0), value=1.0)


def paths_result(paths: Sequence[list[int]], fed: Sequence[int]) -> HostResult:
    taken = [len(path) for path in paths]
    width = 1 + max(taken)
    padded = [path + [-1] * (width - len(path)) for path in paths]
    return HostResult([[]] * len(paths), taken, taken, num_drafts=list(fed), paths=padded)


def tile_spec_of(rounds: MeasuredRoundPrices) -> TileSpec:
    return TileSpec(rounds, has_trees=True)


def step_of(
    tile_spec: TileSpec, num_reqs: int, shape: TreeShape, confidence: torch.Tensor
) -> StepRecord:
    counts = [shape.num_drafts] * num_reqs
    batch = batch_of(counts)
    return record_of(batch, cut_plan(tile_spec, batch, counts), confidence)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_chances_of_nodes_are_learnt_from_confirmed_paths(power: float) -> None:
    """Heads that say the truth, and those that are too sure, of trees of which any first nodes are
    verified: the score of a node to the power is how often it is on the path."""
    luck, shape, num_reqs = random.Random(1), TreeShape(3, 3, 12), 16
    confidence = torch.zeros((num_reqs, shape.num_drafts))
    free = replace(FREE_DRAFTS, passes={shape: FREE_PASS})
    calibration = Calibration()
    with mock.patch.object(cut_module, "Calibration", return_value=calibration):
        tile_spec = tile_spec_of(MeasuredRoundPrices(DEAR_ROWS, free, tree=shape))
    for _ in range(150):
        trees = [random_tree(luck, shape.topk, shape.num_drafts) for _ in range(num_reqs)]
        confidence.copy_(confidence_of(trees))
        record = step_of(tile_spec, num_reqs, shape, confidence)
        fed = [luck.randint(0, shape.num_drafts) for _ in trees]
        found = [
            confirmed_path(tree, count, power, luck) for tree, count in zip(trees, fed, strict=True)
        ]
        told = tile_spec.observe(record, paths_result(found, fed))
        assert told == [len(path) for path in found]
    scores = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert calibration.predict(scores) == pytest.approx(scores**power, abs=0.06)
