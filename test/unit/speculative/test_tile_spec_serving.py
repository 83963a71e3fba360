"""Steps that verify some of the drafts of chains or trees: tokens stay, whichever are left out."""

from __future__ import annotations

import math
from collections import Counter
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
from tile_spec_rounds import DEAR_ROWS, FREE_ROWS, RandomBudgets, free_drafts, prices_of

torch.set_num_threads(1)
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
    request that are no numbers change nothing. Figures count the drafts that were fed."""
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
        outcomes = [harness.outputs[req_id] for req_id in ids]
        assert [outcome.token_ids for outcome in outcomes][: len(right)] == right
        counts = Counter[int]()  # of right drafts
        for outcome in outcomes:
            counts.update(dict(enumerate(outcome.accept_histogram)))
        num_right = sum(count * each for count, each in counts.items())
        num_fed = sum(outcome.num_proposed_drafts for outcome in outcomes)
        state = harness.scheduler.control.internal_state()
        assert state["avg_spec_accept_rate"] == num_right / num_fed
        assert 0 < num_fed <= harness.seen["fed"]
        found[folder is None] = dict(harness.seen)
    harness.scramblers.append(spoil)
    serve(harness, right)
    assert found[False]["cut steps"] > 10
    assert 20 < found[False]["fed"] < 0.7 * found[True]["fed"]
    shares = {key: seen["confirmed"] / seen["fed"] for key, seen in found.items()}
    assert shares[False] > (1.5 if is_tree else 1.0) * shares[True]


@pytest.mark.long_matrix
def test_cut_steps_replay_graphs_for_trees_between_whole_rounds(
    paths: dict[str, Path], tmp_path: Path
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
        served = serving(paths, EAGLE3, setup, **options)
        served.harness.scheduler._worker._on_step = note
        serve(served.harness, right_tokens(paths["target"]))
    assert len(replayed) > 10
    assert all(replayed)
    assert served.rounds
    assert {count for _, count in served.rounds} == {WIDE.num_drafts}
