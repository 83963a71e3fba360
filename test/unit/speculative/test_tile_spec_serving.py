"""Steps that verify some of the drafts of chains or trees: tokens stay, whichever are left out."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import abort, nothing, params_of, pause, prompts, serve
from eagle_models import write_models
from eagle_serving import (
    Served,
    check_all_that_requests_ask_for,
    right_tokens,
    setup_for,
    tree_setup,
)
from jumping_tier import JUMPING, jumping_tiers
from pairwise import name_of, pairwise_cases
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import serving, setup_of
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.step_ops import Q_LEN
from tile_spec_rounds import DEAR_ROWS, FREE_ROWS, RandomBudgets, free_drafts, prices_of

torch.set_num_threads(1)
NUM_SEEDS = int(os.environ.get("TILE_SPEC_SEEDS", "4"))  # 200 by hand
KINDS = (EAGLE, EAGLE3)
Shape = int | TreeShape  # drafts of a chain, or a tree
WIDE = TreeShape(topk=4, depth=3, num_drafts=10)
SHAPES: dict[str, Shape] = {
    "chain of 1": 1,
    "chain of 3": 3,
    "chain of 5": 5,
    "flat": TreeShape(topk=4, depth=1, num_drafts=4),
    "wide": WIDE,
    "deep": TreeShape(topk=2, depth=5, num_drafts=7),
    "few": TreeShape(topk=4, depth=5, num_drafts=3),
}
CHAIN_AND_TREE = pytest.mark.parametrize("shape", [3, WIDE], ids=["chain", "tree"])
# Any number of rows may pay.
ROWS_COST_TIME = prices_of(range(1, 513), [20.0 + rows for rows in range(1, 513)])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("tiled"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


def tiled(
    paths: dict[str, Path],
    folder: Path | None,
    shape: Shape = 3,
    kind: str = EAGLE,
    prices: PriceTable = DEAR_ROWS,
    tier_policy: str = "fixed",
    **changes: Any,
) -> Served:
    options: dict[str, Any] = {"tile_spec_cache": folder, "prices": prices}
    if isinstance(shape, int):
        setup, num_steps = setup_for(shape, **changes), shape
        options["tier_policy"] = tier_policy
    else:
        setup, num_steps = tree_setup(shape, **changes), shape.depth
        options["tree"] = shape
    return Served(paths, kind, num_steps, setup, **options)


def counts_of(shape: Shape) -> tuple[int, int]:
    """Drafts of a request, and how many of them may be confirmed."""
    return (shape, shape) if isinstance(shape, int) else (shape.num_drafts, shape.max_confirmed)


CHOICES: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "kind": KINDS,
    "tier_policy": ("fixed", JUMPING),  # of chains
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "chunked_prefill_size": (6, 2048),
    "retract_interval": (0, 3),
    "disturb": (nothing, pause, abort),
}
CASES = pairwise_cases(CHOICES)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter_whichever_drafts_are_left_out(
    paths: dict[str, Path], tmp_path: Path, case: dict[str, Any]
) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step."""
    changes, budgets = dict(case), RandomBudgets(CASES.index(case))
    shape, disturb = SHAPES[changes.pop("shape")], changes.pop("disturb")
    with budgets.chosen():
        harness = tiled(paths, tmp_path, shape, **changes)
        harness.scramblers.append(budgets.scramble)
        ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    harness.check()
    if case["retract_interval"]:
        assert any(harness.outputs[req_id].num_retractions for req_id in ids)
    assert harness.seen["cut steps"] > 10
    assert harness.seen["fed"] > harness.seen["confirmed"] > 5, harness.seen
    num_drafts, most_right = counts_of(shape)
    if case["tier_policy"] == "fixed":
        assert {count for count, _ in budgets.outcomes} == {num_drafts}
    assert all(0 <= right <= min(count, most_right) for count, right in budgets.outcomes)


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_seed_of_random_shapes_aborts_and_retractions_changes_a_token(
    paths: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    chooser = random.Random(seed)
    topk, depth, shape = chooser.randint(2, 6), chooser.randint(1, 5), 3
    if seed % 2:
        most = min(TreeShape(topk, depth, 1).num_found, 30)
        shape = TreeShape(topk, depth, chooser.randint(2, most))
    changes = {"kind": chooser.choice(KINDS), "retract_interval": chooser.choice([0, 3, 5])}
    budgets, disturb = RandomBudgets(seed), chooser.choice([nothing, pause, abort])
    with budgets.chosen():
        harness = tiled(paths, tmp_path, shape, tier_policy=JUMPING, **changes)
        harness.scramblers.append(budgets.scramble)
        serve(harness, right_tokens(paths["target"]), disturb, seed=seed)
    harness.check()
    assert harness.seen["cut steps"] > 5


@CHAIN_AND_TREE
def test_none_all_and_some_drafts_are_verified_in_one_step(
    paths: dict[str, Path], tmp_path: Path, shape: Shape
) -> None:
    """And what is verified of a tree is a tree, of which a path beside the first one is right."""
    fed, most, budgets = list[list[int]](), counts_of(shape)[0], RandomBudgets(0)

    def spread(step: ComputedStep) -> None:
        assert step.state.confidence is not None
        step.state.confidence.drafts[::2], step.state.confidence.drafts[1::2] = 0.99, 0.1

    def note(step: ComputedStep) -> None:
        lookahead = step.chosen.layout.lookahead
        if step.plan.counts.packed is None or lookahead is None:
            return
        fed.append((step.chosen.layout.per_request[Q_LEN] - 1).tolist())
        if lookahead.parents is None:
            assert isinstance(shape, int)
            return
        starts = lookahead.q_starts.tolist()
        ends = zip(starts, starts[1:], step.batch.num_prompt_tokens, strict=False)
        for start, end, num_prompt in ends:
            above = [] if num_prompt else lookahead.parents[start:end].tolist()
            assert all(0 <= parent < node for node, parent in enumerate(above) if node)

    with budgets.chosen():
        harness = tiled(paths, tmp_path, shape)
        harness.scramblers.append(spread)
        harness.listeners.append(note)
        serve(harness, right_tokens(paths["target"]))
    assert any({0, most} <= {*counts} for counts in fed)
    assert any({*range(1, most)} & {*counts} for counts in fed)
    assert harness.seen["moved"] > 2 or isinstance(shape, int), harness.seen


@pytest.mark.long_matrix
@CHAIN_AND_TREE
def test_all_that_requests_ask_for_is_what_they_get_without_a_head(
    paths: dict[str, Path], tmp_path: Path, shape: Shape
) -> None:
    with RandomBudgets(1).chosen():
        harness = tiled(paths, tmp_path, shape, chunked_prefill_size=5)
        check_all_that_requests_ask_for(harness, paths["target"])
    assert harness.seen["cut steps"] > 10


@pytest.mark.long_matrix
@CHAIN_AND_TREE
def test_where_rows_cost_nothing_steps_are_those_without_tile_spec(
    paths: dict[str, Path], tmp_path: Path, shape: Shape
) -> None:
    """And nothing more is copied from the device."""
    plans = []

    def note(step: ComputedStep) -> None:
        plans[-1].append((step.plan, step.inputs.input_ids.tolist()))

    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, folder, shape, EAGLE3, FREE_ROWS)
        plans.append([])
        harness.listeners.append(note)
        serve(harness, right_tokens(paths["target"]))
        assert harness.seen["cut steps"] == 0
    assert plans[0] == plans[1]
    assert not any(plan.wants_scores or plan.wants_paths for plan, _ in plans[1])


@CHAIN_AND_TREE
def test_where_rows_are_dear_only_likely_drafts_are_verified(
    paths: dict[str, Path], tmp_path: Path, shape: Shape
) -> None:
    """Goes by prices alone: nothing is forced. More of what is verified is right. Scores of a
    request that are no numbers change nothing."""
    found = {}
    is_tree, right = isinstance(shape, TreeShape), right_tokens(paths["target"])

    def spoil(step: ComputedStep) -> None:
        assert step.state.confidence is not None
        step.state.confidence.drafts[1] = math.nan

    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, folder, shape, prices=ROWS_COST_TIME if is_tree else DEAR_ROWS)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts() * 3)]
        harness.run()
        harness.check()
        assert [harness.outputs[req_id].token_ids for req_id in ids][: len(right)] == right
        found[folder is None] = dict(harness.seen)
    harness.scramblers.append(spoil)
    serve(harness, right)
    assert found[False]["cut steps"] > 10
    assert 20 < found[False]["fed"] < 0.7 * found[True]["fed"]
    shares = {key: seen["confirmed"] / seen["fed"] for key, seen in found.items()}
    assert shares[False] > (1.5 if is_tree else 1.0) * shares[True]


def test_figures_count_the_drafts_that_were_fed(paths: dict[str, Path], tmp_path: Path) -> None:
    with RandomBudgets(2).chosen():
        harness = tiled(paths, tmp_path)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
        harness.run()
    state = harness.scheduler.control.internal_state()
    outcomes = [harness.outputs[req_id] for req_id in ids]
    confirmed = sum(
        count * each for outcome in outcomes for count, each in enumerate(outcome.accept_histogram)
    )
    proposed = sum(outcome.num_proposed_drafts for outcome in outcomes)
    assert state["avg_spec_accept_rate"] == confirmed / proposed
    num_steps = (
        state["avg_spec_accept_length"]
        - state["avg_spec_accept_rate"] * (state["avg_spec_verified_drafts"])
    )
    assert num_steps == pytest.approx(1.0), "each step gives a token beside its right drafts"
    assert 0 < proposed <= harness.seen["fed"]


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
