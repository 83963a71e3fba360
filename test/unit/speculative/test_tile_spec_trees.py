"""Steps that verify some nodes of trees: tokens stay, whichever are left out; and what is learnt of
nodes and what rounds of trees cost."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import abort, nothing, params_of, pause, prompts, serve
from eagle_models import write_models
from eagle_serving import (
    Served,
    check_all_that_requests_ask_for,
    right_tokens,
    tree_setup,
)
from pairwise import name_of, pairwise_cases
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import serving, setup_of
from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.lookahead.draft_rows import plan_of_drafts
from sglang.srt.lookahead.round_prices import MeasuredRounds, StepCase
from sglang.srt.lookahead.tile_spec import RoundTables, TileSpec, confirmed_nodes
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PriceTable, no_graphs
from sglang.srt.step.step_ops import Q_LEN
from sglang.srt.step.worker import HostResult
from tile_spec_decode import batch_of, record_of
from tile_spec_rounds import (
    DEAR_ROWS,
    FREE_DRAFTS,
    FREE_PASS,
    FREE_ROWS,
    RandomBudgets,
    free_drafts,
    prices_of,
)

torch.set_num_threads(1)
NUM_SEEDS = int(os.environ.get("TILE_SPEC_SEEDS", "2"))  # 200 by hand
KINDS = (EAGLE, EAGLE3)
WIDE = TreeShape(topk=4, depth=3, num_drafts=10)
SHAPES = {
    "flat": TreeShape(topk=4, depth=1, num_drafts=4),
    "wide": WIDE,
    "deep": TreeShape(topk=2, depth=5, num_drafts=7),
    "few": TreeShape(topk=4, depth=5, num_drafts=3),
}
# Any number of rows may pay.
ROWS_COST_TIME = prices_of(range(1, 513), [20.0 + rows for rows in range(1, 513)])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("tiled"))


def tiled(
    paths: dict[str, Path],
    folder: Path | None,
    kind: str = EAGLE,
    shape: TreeShape = WIDE,
    prices: PriceTable = DEAR_ROWS,
    **changes: Any,
) -> Served:
    setup = tree_setup(shape, **changes)
    options = {"tree": shape, "tile_spec_cache": folder}
    return Served(paths, kind, shape.depth, setup, prices=prices, **options)


CHOICES: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "kind": KINDS,
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "chunked_prefill_size": (6, 2048),
    "retract_interval": (0, 3),
    "disturb": (nothing, pause, abort),
}
CASES = pairwise_cases(CHOICES)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter_whichever_nodes_are_left_out(
    paths: dict[str, Path], tmp_path: Path, case: dict[str, Any]
) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step."""
    changes = dict(case)
    shape, disturb = SHAPES[changes.pop("shape")], changes.pop("disturb")
    budgets = RandomBudgets(CASES.index(case))
    with budgets.chosen():
        harness = tiled(paths, tmp_path, shape=shape, **changes)
        harness.scramblers.append(budgets.scramble)
        ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    if case["retract_interval"]:
        assert any(harness.outputs[req_id].num_retractions for req_id in ids)
    assert harness.seen["cut steps"] > 10
    assert harness.seen["fed"] > harness.seen["confirmed"] > 5, harness.seen
    assert {count for count, _ in budgets.outcomes} == {shape.num_drafts}
    assert max(right for _, right in budgets.outcomes) <= shape.max_confirmed


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_seed_of_random_shapes_aborts_and_retractions_changes_a_token(
    paths: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    chooser = random.Random(seed)
    topk, depth = chooser.randint(2, 6), chooser.randint(1, 5)
    most = TreeShape(topk, depth, 1).num_found
    shape = TreeShape(topk, depth, chooser.randint(2, min(most, 30)))
    disturb = chooser.choice([nothing, pause, abort])
    budgets = RandomBudgets(seed)
    with budgets.chosen():
        interval = chooser.choice([0, 3, 5])
        harness = tiled(paths, tmp_path, KINDS[seed % 2], shape, retract_interval=interval)
        harness.scramblers.append(budgets.scramble)
        serve(harness, right_tokens(paths["target"]), disturb, seed=seed)
    assert harness.seen["cut steps"] > 5


def test_none_all_and_some_nodes_are_verified_in_one_step(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """And what is verified of a tree is a tree, of which a path beside the first one is right."""
    fed, most = list[list[int]](), WIDE.num_drafts
    budgets = RandomBudgets(0)

    def spread(step: ComputedStep) -> None:
        confidence = step.state.confidence
        assert confidence is not None
        confidence.drafts[::2], confidence.drafts[1::2] = 0.99, 0.1

    def note(step: ComputedStep) -> None:
        lookahead = step.chosen.layout.lookahead
        if step.plan.counts.packed is None or lookahead is None:
            return
        counts = (step.chosen.layout.per_request[Q_LEN] - 1).tolist()
        fed.append(counts)
        parents = lookahead.parents
        assert parents is not None
        starts = lookahead.q_starts.tolist()
        for start, end, num_prompt in zip(
            starts, starts[1:], step.batch.num_prompt_tokens, strict=False
        ):
            above = parents[start:end].tolist() if num_prompt == 0 else []
            assert all(0 <= parent < node for node, parent in enumerate(above) if node)

    with budgets.chosen():
        harness = tiled(paths, tmp_path)
        harness.scramblers.append(spread)
        harness.listeners.append(note)
        serve(harness, right_tokens(paths["target"]))
    assert any({0, most} <= {*counts} for counts in fed)
    assert any({*range(1, most)} & {*counts} for counts in fed)
    assert harness.seen["moved"] > 2, harness.seen


@pytest.mark.long_matrix
def test_all_that_requests_ask_for_is_what_they_get_without_a_head(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    with RandomBudgets(1).chosen():
        harness = tiled(paths, tmp_path, chunked_prefill_size=5)
        check_all_that_requests_ask_for(harness, paths["target"])
    assert harness.seen["cut steps"] > 10


def test_where_rows_cost_nothing_steps_are_those_without_tile_spec(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """And nothing more is copied from the device."""
    plans = []

    def note(step: ComputedStep) -> None:
        plans[-1].append((step.plan, step.inputs.input_ids.tolist()))

    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, folder, EAGLE3, prices=FREE_ROWS)
        plans.append([])
        harness.listeners.append(note)
        serve(harness, right_tokens(paths["target"]))
        assert harness.seen["cut steps"] == 0
    assert plans[0] == plans[1]
    assert not any(plan.wants_scores or plan.wants_paths for plan, _ in plans[1])


def test_where_rows_are_dear_only_likely_nodes_are_verified(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """By prices alone: nothing is forced. More of what is verified is right."""
    found = {}
    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, folder, prices=ROWS_COST_TIME)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts() * 3)]
        harness.run()
        harness.check()
        right = right_tokens(paths["target"])
        assert [harness.outputs[req_id].token_ids for req_id in ids][: len(right)] == right
        found[folder is None] = harness.seen
    assert found[False]["cut steps"] > 10
    assert 20 < found[False]["fed"] < 0.7 * found[True]["fed"]
    shares = {key: seen["confirmed"] / seen["fed"] for key, seen in found.items()}
    assert shares[False] > 1.5 * shares[True]


def test_scores_that_are_no_numbers_change_no_token(paths: dict[str, Path], tmp_path: Path) -> None:
    def spoil(step: ComputedStep) -> None:
        assert step.state.confidence is not None
        step.state.confidence.drafts[1] = math.nan

    with free_drafts():
        harness = tiled(paths, tmp_path)
    harness.scramblers.append(spoil)
    serve(harness, right_tokens(paths["target"]))
    assert harness.seen["cut steps"] > 10


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", KINDS)
def test_cut_steps_replay_graphs_for_trees_between_whole_rounds(
    paths: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Steps that are not cut are graphs as a whole, as without TileSpec."""
    slots = 1 + WIDE.num_drafts + WIDE.num_slots
    budgets, replayed = RandomBudgets(3), list[bool]()

    def note(step: ComputedStep) -> None:
        if step.plan.counts.packed is not None and not any(step.batch.num_prompt_tokens):
            assert step.inputs.ancestors is not None
            replayed.append(step.forward.used_graph)

    with recorded_graphs(), replayable_backends(), budgets.chosen():
        setup = setup_of(max_decode_rows=slots)
        options = {"tree": WIDE, "tile_spec_cache": tmp_path, "prices": DEAR_ROWS}
        served = serving(paths, kind, setup, **options)
        served.harness.scheduler._worker._on_step = note
        serve(served.harness, right_tokens(paths["target"]))
    assert len(replayed) > 10
    assert all(replayed)
    assert served.rounds
    assert {count for _, count in served.rounds} == {WIDE.num_drafts}


# ---------------------------------------------------------------- what is learnt


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


def result_of(paths: Sequence[list[int]], fed: Sequence[int]) -> HostResult:
    taken = [len(path) for path in paths]
    width = 1 + max(taken)
    padded = [path + [-1] * (width - len(path)) for path in paths]
    return HostResult([[]] * len(paths), taken, taken, num_drafts=list(fed), paths=padded)


def tile_spec_of(rounds: MeasuredRounds) -> TileSpec:
    return TileSpec(RoundTables(rounds, packs_in_graphs=True), has_trees=True)


def step_of(
    tile_spec: TileSpec, num_reqs: int, shape: TreeShape, confidence: torch.Tensor
) -> StepRecord:
    counts = [shape.num_drafts] * num_reqs
    batch = batch_of(counts)
    plan = tile_spec.cut(batch, plan_of_drafts(batch, counts, shape.max_confirmed))
    return record_of(batch, plan, confidence)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_chances_of_nodes_are_learnt_from_confirmed_paths(power: float) -> None:
    """Heads that say the truth, and those that are too sure, of trees of which any first nodes are
    verified: the score of a node to the power is how often it is on the path."""
    luck, shape, num_reqs = random.Random(1), TreeShape(3, 3, 12), 16
    confidence = torch.zeros((num_reqs, shape.num_drafts))
    free = replace(FREE_DRAFTS, passes={shape: FREE_PASS})
    tile_spec = tile_spec_of(MeasuredRounds(DEAR_ROWS, free, tree=shape))
    for _ in range(150):
        trees = [random_tree(luck, shape.topk, shape.num_drafts) for _ in range(num_reqs)]
        confidence.copy_(confidence_of(trees))
        record = step_of(tile_spec, num_reqs, shape, confidence)
        assert record.plan.wants_paths
        fed = [luck.randint(0, shape.num_drafts) for _ in trees]
        found = [
            confirmed_path(tree, count, power, luck) for tree, count in zip(trees, fed, strict=True)
        ]
        told = tile_spec.observe(record, result_of(found, fed))
        assert told == [len(path) for path in found]
    scores = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
    learnt = tile_spec._calibration.predict(scores)
    assert learnt == pytest.approx(scores**power, abs=0.06)


def test_nodes_on_a_path_are_told_from_those_beside_it() -> None:
    paths = np.array([[0, 2, 5, -1], [0, -1, -1, -1], [0, 1, 2, 3], [0, 4, 4, 4]])
    found = confirmed_nodes(paths, np.array([2, 0, 3, 1]), 5)
    right = [{2, 5}, set(), {1, 2, 3}, {4}]
    assert [{*(np.flatnonzero(row) + 1)} for row in found] == right


def test_as_many_nodes_are_verified_as_give_most_tokens_per_millisecond() -> None:
    """Of all ways to cut both trees, the best has as many. Nodes are worth their scores."""
    luck, shape = random.Random(2), TreeShape(2, 3, 6)
    sizes = tuple(range(1, 2 * (1 + shape.num_drafts) + 1))
    seen = set[int]()
    for _ in range(40):
        costs = tuple(
            10.0 + row_ms for row_ms in itertools.accumulate(luck.random() for _ in sizes)
        )
        prices = PriceTable(no_graphs, {}, Curve(sizes, costs), Curve((1, 64), (0.0, 0.0)))
        free = replace(FREE_DRAFTS, passes={shape: FREE_PASS})
        trees = [random_tree(luck, 2, shape.num_drafts) for _ in range(2)]
        tile_spec = tile_spec_of(MeasuredRounds(prices, free, tree=shape))
        confidence = confidence_of(trees)
        record = step_of(tile_spec, 2, shape, confidence)
        # Nothing was verified, nothing is learnt.
        tile_spec.observe(record, result_of([[0], [0]], [0, 0]))
        plan = step_of(tile_spec, 2, shape, confidence).plan

        def rate(cut: tuple[int, ...], trees: Any = trees, costs: Any = costs) -> float:
            values = (sum(tree.scores[:n]) for tree, n in zip(trees, cut, strict=True))
            return (2 + sum(values)) / costs[2 + sum(cut) - 1]

        best = max(itertools.product(range(1 + shape.num_drafts), repeat=2), key=rate)
        chosen = plan.counts.num_rows - 2
        assert chosen == sum(best) or rate(best) < 1.02 * max(
            rate(cut)
            for cut in itertools.product(range(1 + shape.num_drafts), repeat=2)
            if sum(cut) == chosen
        )
        seen.add(chosen)
    assert len(seen) > 2, seen


# ---------------------------------------------------------------- what rounds cost


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_round_costs_the_rows_verified_the_pass_over_paths_and_the_drafting(
    shape: TreeShape,
) -> None:
    width, paths = 1 + shape.num_drafts, 1 + shape.max_confirmed
    target = PriceTable(no_graphs, {}, Curve((1, 1000), (1.0, 1000.0)), Curve((1,), (2.0,)), 3, 4)
    extend_rows, head = Curve((1, 1000), (0.1, 100.0)), Curve((1,), (50.0,))
    extend = PriceTable(no_graphs, {}, extend_rows, head, 0.3, 0.4)
    passes = {shape: Curve((1, 8), (7.0, 56.0)), 1: Curve((1,), (1e9,))}
    rounds = MeasuredRounds(target, DraftPrices(extend, passes), tree=shape)
    for num_reqs, num_cut, prompts_fed in itertools.product((1, 3, 8), (0, 2), (0, 32)):
        rows = num_reqs * width - num_cut
        cost = rounds.cost(num_reqs, shape.num_drafts, rows, prompts_fed)
        expected = 1.0 * (rows + prompts_fed) + 2.0 * (rows + (prompts_fed > 0))
        expected += 0.1 * (num_reqs * paths + prompts_fed) + 7.0 * num_reqs
        assert cost.rows_ms == pytest.approx(expected)
        kv_ms = 3 + 4 * rows / num_reqs + 0.3 + 0.4 * paths
        kv_ms += (shape.depth - 1) * (0.3 + 0.4 * shape.topk)
        assert cost.kv_ms == pytest.approx(kv_ms)
    table = RoundTables(rounds, packs_in_graphs=False).table(StepCase(3), shape.num_drafts)
    assert table.rows[-1] == 3 * width
    assert table.costs_ms[-1] == pytest.approx(rounds.cost(3, shape.num_drafts, 3 * width).rows_ms)
