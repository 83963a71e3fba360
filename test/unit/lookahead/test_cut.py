"""Checks how many drafts a step verifies: the arithmetic against searches and planted curves, what
is cut of steps, and what is learnt from them, of chains and of trees."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead import cut as cut_module
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.cut import (
    BIN_TRIALS,
    LEAST_CHANCE,
    LOOK_STEPS,
    MOST_CHANCE,
    NUM_BINS,
    Calibration,
    LatencyTable,
    TileSpec,
    best_cut,
    bounded_scores,
    compute_optimal_k,
    expected_right,
    extended,
    isotonic,
)
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import HostResult
from tile_spec_decode import batch_of, cut_plan, record_of
from tile_spec_rounds import DEAR_ROWS, FREE_DRAFTS, FREE_PASS, prices_of


def random_chains(chooser: random.Random, num_reqs: int, depth: int) -> list[list[float]]:
    """Chances that never rise along a chain; some are equal, some 0 or 1."""
    steps = [0.0, 0.5, 0.5, 0.8, 1.0, 1.0]
    return [
        list(itertools.accumulate((chooser.choice(steps) for _ in range(depth)), float.__mul__))
        if chooser.random() < 0.5
        else sorted((chooser.random() for _ in range(depth)), reverse=True)
        for _ in range(num_reqs)
    ]


def random_table(chooser: random.Random, num_reqs: int, num_drafts: int) -> LatencyTable:
    """Falls in places; some buckets have no room for the requests, some more than is needed."""
    most = num_reqs + num_drafts
    rows = {chooser.randint(1, most + 9) for _ in range(chooser.randint(0, 6))} | {most}
    costs = [chooser.choice([1.0, 2.0, 5.0 * chooser.random() + 0.1]) for _ in rows]
    return LatencyTable(tuple(sorted(rows)), tuple(costs))


def rate_of(k: int, ordered: list[float], num_reqs: int, table: LatencyTable) -> float:
    """Tokens per millisecond with k drafts, in the cheapest bucket that has room for them."""
    tokens = num_reqs + math.fsum(ordered[:k])
    priced = zip(table.rows, table.costs_ms, strict=True)
    return max((tokens / cost for rows, cost in priced if rows >= num_reqs + k), default=0.0)


def right_of(chances: ArrayLike) -> NDArray[np.float64]:
    return expected_right(bounded_scores(chances))


def test_the_number_of_drafts_is_that_of_a_search_over_all_numbers() -> None:
    """All of them unless fewer gain more than asked for. Of equal rates the largest number, so all
    where rows cost nothing; a larger bucket that is cheaper is filled."""
    chooser, numbers = random.Random(0), set[str]()
    for _ in range(1200):
        num_reqs, depth = chooser.randint(1, 8), chooser.randint(1, 5)
        chances = random_chains(chooser, num_reqs, depth)
        table = random_table(chooser, num_reqs, num_reqs * depth)
        ordered = sorted(itertools.chain.from_iterable(chances), reverse=True)
        most, full = len(ordered), (num_reqs + math.fsum(ordered)) / table.costs_ms[-1]
        rates = [rate_of(k, ordered, num_reqs, table) for k in range(most + 1)]
        least = chooser.choice([0.0, chooser.random()])
        num_drafts, gain = best_cut(right_of(chances), most, num_reqs, table, least)
        assert num_drafts == compute_optimal_k(chances, num_reqs, table, least)
        if max(rates) <= full * (1 + least) * (1 + 1e-12):
            assert (num_drafts, gain) == (most, 1.0)
        else:
            assert rates[num_drafts] == pytest.approx(max(rates), rel=1e-12)
            assert gain == pytest.approx(max(rates) / full)
            assert table.most_gain > least, "what `wants_scores` would have missed"
        wholes = [k for k, rate in enumerate(rates) if rate >= max(rates) * (1 - 1e-12)]
        assert num_drafts in (most, max(wholes))
        numbers.add({0: "none", most: "all"}.get(num_drafts, "some"))
    assert numbers == {"none", "some", "all"}
    assert compute_optimal_k([], 8, LatencyTable((8,), (1.0,))) == 0
    for bad_rows, costs in (((1,), (1.0, 2.0)), ((1,), (0.0,))):
        with pytest.raises((ValueError, ZeroDivisionError)):
            compute_optimal_k([0.5], 1, LatencyTable(bad_rows, costs))


def test_chances_and_scores_that_are_no_numbers_end_nothing() -> None:
    """The device takes such scores for 0 too."""
    bad = [math.nan, -math.inf, -1.0, math.inf, 2.0]
    assert bounded_scores([*bad, 0.9]).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.9]
    for value in bad[:4]:
        chances = np.array([[0.9] * 3, [value] * 3])
        taken = np.where(chances == math.inf, 1.0, np.where(chances == 0.9, 0.9, 0.0))
        assert right_of(chances).tolist() == right_of(taken).tolist()


CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "right": lambda score: score,
    "too sure": lambda score: score**2,
    "too humble": lambda score: np.sqrt(score),
    "step": lambda score: np.where(score < 0.5, 0.1, 0.8),
    "line": lambda score: 0.2 + 0.5 * score,
}


def draw(
    rng: np.random.Generator, curve: Callable[[np.ndarray], np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = rng.random(count)
    return scores, rng.random(count) < curve(scores)


@pytest.mark.parametrize("name", CURVES)
def test_calibration_finds_a_planted_curve(name: str) -> None:
    rng, calibration = np.random.default_rng(0), Calibration()
    for _ in range(100):
        calibration.observe(*draw(rng, CURVES[name], 200))
    scores = np.linspace(0.02, 0.98, 97)
    scores = scores[np.abs(scores - 0.5) > 0.04]  # not at the step itself
    off = np.abs(calibration.predict(scores) - CURVES[name](scores))
    assert off.mean() < 0.03
    assert off.max() < 0.12
    whole = calibration.predict(np.linspace(0, 1, 1001))
    assert (np.diff(whole) >= 0).all()
    assert whole.min() >= LEAST_CHANCE
    assert whole.max() <= MOST_CHANCE


def test_a_score_is_its_own_chance_at_first_and_old_trials_are_forgotten() -> None:
    rng, calibration = np.random.default_rng(2), Calibration()
    scores = np.linspace(0.05, 0.95, 10)
    np.testing.assert_allclose(calibration.predict(scores), scores, atol=0.02)
    calibration.observe([], [])
    for curve in (CURVES["too sure"], CURVES["too humble"]):
        for _ in range(200):
            calibration.observe(*draw(rng, curve, 200))
    assert np.abs(calibration.predict(scores) - CURVES["too humble"](scores)).mean() < 0.03


def test_drafts_that_are_told_at_once_count_alike_beside_what_is_remembered() -> None:
    """Whatever their order is, and though they are more than what is remembered of a bin."""
    rng, grid, found = np.random.default_rng(4), np.linspace(0.05, 0.95, 91), list[np.ndarray]()
    size = 4 * NUM_BINS * int(BIN_TRIALS)
    before, (scores, confirmed) = draw(rng, CURVES["right"], size), draw(rng, CURVES["line"], size)
    for order in (np.argsort(confirmed), np.argsort(~confirmed), rng.permutation(size)):
        calibration = Calibration()
        calibration.observe(*before)
        calibration.observe(scores[order], confirmed[order])
        found.append(calibration.predict(grid))
        assert found[-1].tolist() == found[0].tolist()
    expected = 0.2 * grid + 0.8 * CURVES["line"](grid)
    assert np.abs(found[0] - expected).max() < 0.04


def test_pooling_gives_the_closest_values_that_never_fall() -> None:
    """No other such values on a grid are closer."""
    chooser = random.Random(3)
    grid = [each / 6 for each in range(7)]
    for _ in range(60):
        values = np.array([chooser.choice(grid) for _ in range(4)])
        weights = np.array([chooser.choice([1.0, 2.0, 5.0]) for _ in range(4)])
        found = isotonic(values, weights)
        assert (np.diff(found) >= -1e-12).all()
        least = (weights * (found - values) ** 2).sum()
        for other in itertools.combinations_with_replacement(grid, 4):
            assert least <= (weights * (np.array(other) - values) ** 2).sum() + 1e-12


# ---------------------------------------------------------------- steps that are cut

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
    cases = StepCase(64), StepCase(64, kv_tokens)
    without, with_kv = (TileSpec(rounds).table(case, DEPTH) for case in cases)
    assert without.rows == (96, 128, 160, 192, 224, 256)
    assert without.costs_ms == pytest.approx([1.1 * rows for rows in (96, 128, 160, 96, 224, 256)])
    each = [2 * (1e-6 + 1e-7 * rows / 64) + 2 * (1e-6 + 1e-7) for rows in without.rows]
    more = np.subtract(with_kv.costs_ms, without.costs_ms)
    assert more == pytest.approx([kv_tokens * kv_ms for kv_ms in each])
    few = TileSpec(rounds).table(StepCase(5), 1)
    assert few.rows[-1] == 10, "all drafts, whatever room the graph has"
    assert few.most_gain == 0.0, "one graph serves any number of them"
    launched = TileSpec(with_graphs(GraphSupport.UNIFORM_Q), packs_in_graphs=False)
    found = launched.table(StepCase(64), DEPTH)
    assert found.costs_ms[-1] == pytest.approx(1.1 * 256)
    assert min(found.costs_ms[:-1]) > 1000
    assert found.most_gain == 0.0


def test_chances_of_fewer_or_more_drafts_tell_what_these_would() -> None:
    """Tables are of the drafts at hand; chances are those of as many drafts, each a few times or
    once."""
    chooser, numbers = random.Random(4), set[str]()
    for _ in range(600):
        num_reqs, size, times = (chooser.randint(1, most) for most in (8, 20, 5))
        some = np.array([chooser.random() for _ in range(size)])
        many, most = some.repeat(times), size * times
        for count, chances, told in ((most, many, some), (size, some, many)):
            table = random_table(chooser, num_reqs, count)
            expected = best_cut(right_of(chances), count, num_reqs, table, 1e-9)
            found = best_cut(right_of(told), count, num_reqs, table, 1e-9)
            assert found == pytest.approx(expected, rel=1e-9)
            numbers.add({0: "none", count: "all"}.get(found[0], "some"))
    assert numbers == {"none", "some", "all"}


def test_short_chains_are_thought_of_as_going_on_like_their_last_draft() -> None:
    scores = np.cumprod(np.random.default_rng(0).random((40, DEPTH)), axis=1)
    assert extended(scores, DEPTH) is scores
    longer = extended(scores[:, :2], 5)
    assert longer[:, :2].tolist() == scores[:, :2].tolist()
    assert longer.mean() < scores.mean()
    chain = np.array([[0.5, 0.25]] * 3)
    assert extended(chain, 4).tolist() == [[0.5, 0.25, 0.125, 0.0625]] * 3


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
        plan = cut_plan(self.tile_spec, batch, [0] * num_prompts + [*num_drafts])
        self.record = record_of(batch, plan, self.confidence)
        return plan

    def observe(self, fed: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
        """Returns of each request with drafts how many, and how many of them were right."""
        taken = [1 + count for count in right]
        result = HostResult([[]] * len(taken), taken, taken, num_drafts=[*fed])
        found = self.tile_spec.observe(self.record, result)
        pairs = zip(self.record.plan.num_drafts, found, strict=True)
        return [(count, each - 1) for count, each in pairs if count]


def test_scores_are_renewed_if_only_every_second_step_has_drafts() -> None:
    rows = prices_of((64, 64 * (1 + DEPTH)), (10.0, 13.0))  # a draft pays if its chance is over 0.1
    cutting, sizes = Cutting(MeasuredRoundPrices(rows, FREE_DRAFTS)), list[int]()
    for confidence, num_right in ((0.05, 0), (0.95, DEPTH)):
        cutting.confidence.fill_(confidence)
        for _ in range(40):
            cutting.observe(cutting.cut([DEPTH] * 64).num_drafts, [num_right] * 64)
            cutting.record = replace(cutting.record, scores=None)
            cutting.observe([0] * 64, [0] * 64)
        packed = cutting.cut([DEPTH] * 64).counts.packed
        sizes.append(64 * (1 + DEPTH) if packed is None else packed.num_rows)
    assert sizes[0] < sizes[1]


def test_beside_prompts_as_many_drafts_are_verified_and_prompts_are_fed_whole() -> None:
    fewer_free = prices_of((1, 20, 300), (1.0, 20.0, 20.1))  # beside 20 rows more are free
    for rows, beside in ((DEAR_ROWS, PackedSize(2 * 10 + 4, 2 + 4)), (fewer_free, None)):
        cutting = Cutting(MeasuredRoundPrices(rows, FREE_DRAFTS), 0.05)
        cutting.cut([DEPTH] * 4)
        cutting.observe([DEPTH] * 4, [0] * 4)
        assert cutting.cut([DEPTH] * 4).counts.packed == PackedSize(4, 4)
        assert cutting.cut([DEPTH] * 4, num_prompts=2).counts.packed == beside


@pytest.mark.parametrize("num_plain", [0, 60])
def test_requests_that_take_no_drafts_have_rows_in_what_is_cut(num_plain: int) -> None:
    """A cut gains what rows of wrong drafts cost, of those who have any."""
    cutting, num_drafting, num_reqs = Cutting(DEAR, 0.0), 4, 4 + num_plain
    cutting.confidence[num_drafting:] = 0.9  # of drafts that nobody takes
    num_drafts = [DEPTH] * num_drafting + [0] * num_plain
    for _ in range(40):
        plan = cutting.cut(num_drafts)
        cutting.observe(num_drafts, [0] * num_reqs)
    assert plan.counts.packed == PackedSize(num_reqs, num_reqs)
    gain = cutting.tile_spec.gain(StepCase(num_reqs, num_plain=num_plain), DEPTH)
    # A draft's chance is thought to be 1 of 100 at least.
    tokens = num_reqs / (num_reqs + 0.01 * sum(num_drafts))
    assert gain == pytest.approx(tokens * (1 + sum(num_drafts) / num_reqs), rel=0.02)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_who_learns_from_cut_steps_learns_what_uncut_ones_would_have_told(chance: float) -> None:
    """Drafts are right with the chance that the head says; any number of each chain is fed."""
    luck, cutting, told = random.Random(5), Cutting(DEAR, chance), np.zeros(1 + DEPTH)
    for _ in range(400):
        cutting.cut([DEPTH] * 8)
        fed = [luck.randint(0, DEPTH) for _ in range(8)]
        whole = [next(i for i in range(9) if i == DEPTH or luck.random() >= chance) for _ in fed]
        for count, num_right in cutting.observe(fed, [*map(min, whole, fed)]):
            assert count == DEPTH
            told[num_right] += 1
    expected = chance ** np.arange(1 + DEPTH) * [*[1 - chance] * DEPTH, 1]
    assert told / told.sum() == pytest.approx(expected, abs=0.04)


def test_what_cutting_gains_is_heard_once_scores_are_known_and_every_few_steps() -> None:
    cutting, upcoming, found = Cutting(DEAR), StepCase(4), list[float]()
    for _ in range(2 * LOOK_STEPS):
        found.append(cutting.tile_spec.round_ms(upcoming, DEPTH))
        assert cutting.tile_spec.round_ms(upcoming, DEPTH) == found[-1]
        cutting.cut([DEPTH] * 4)
        cutting.observe([DEPTH] * 4, [0] * 4)
    assert found[0] == DEAR.round_ms(upcoming, DEPTH) > found[1]
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


def random_tree(luck: random.Random, num_drafts: int) -> Tree:
    """Any tree. What is said of siblings sums up to less than 1."""
    nodes, left = [(1.0, 0, 1.0)], [1.0]  # score, parent, what is said; what may be said of others
    for _ in range(num_drafts):
        parent = luck.randrange(len(nodes))
        told = left[parent] * luck.uniform(0.2, 0.8)
        left[parent] -= told
        nodes.append((nodes[parent][0] * told, parent, told))
        left.append(1.0)
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    scores, parents, all_told = zip(*[nodes[node] for node in order[1:]], strict=True)
    return Tree([*scores], [*map(order.index, parents)], [*all_told])


def confirmed_path(tree: Tree, num_fed: int, power: float, luck: random.Random) -> list[int]:
    """From the root on: each draft is right with what the head says of it to this power."""
    path, lot = [0], luck.random()
    for node in range(1, 1 + num_fed):  # each comes after the one that it follows
        if tree.parents[node - 1] == path[-1]:
            lot -= tree.told[node - 1] ** power
            if lot < 0:
                path.append(node)
                lot = luck.random()
    return path


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_chances_of_nodes_are_learnt_from_confirmed_paths(power: float) -> None:
    """Heads that say the truth, and those that are too sure, of trees of which any first nodes are
    verified: the score of a node to the power is how often it is on the path."""
    luck, shape, num_reqs = random.Random(1), TreeShape(3, 3, 12), 16
    free = replace(FREE_DRAFTS, passes={shape: FREE_PASS})
    calibration, counts = Calibration(), [shape.num_drafts] * num_reqs
    with mock.patch.object(cut_module, "Calibration", return_value=calibration):
        rounds = MeasuredRoundPrices(DEAR_ROWS, free, tree=shape)
        tile_spec = TileSpec(rounds)
    for _ in range(150):
        trees = [random_tree(luck, shape.num_drafts) for _ in range(num_reqs)]
        scores, batch = torch.tensor([tree.scores for tree in trees]), batch_of(counts)
        told = scores / torch.nn.functional.pad(scores[:, :-1], (1, 0), value=1.0)
        record = record_of(batch, cut_plan(tile_spec, batch, counts), told)
        fed = [luck.randint(0, shape.num_drafts) for _ in trees]
        paths = [confirmed_path(*each, power, luck) for each in zip(trees, fed, strict=True)]
        taken = [len(path) for path in paths]
        padded = [path + [-1] * (max(taken) - len(path)) for path in paths]
        result = HostResult([[]] * num_reqs, taken, taken, num_drafts=fed, paths=padded)
        assert tile_spec.observe(record, result) == taken
    some = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert calibration.predict(some) == pytest.approx(some**power, abs=0.06)
