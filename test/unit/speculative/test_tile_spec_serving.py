"""Steps that verify some of the drafts of chains or trees: tokens stay, whichever are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

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
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.worker import ScheduleBatch
from tile_spec_rounds import DEAR_ROWS, RandomBudgets, free_drafts, prices_of

torch.set_num_threads(1)
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


CHOICES: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "kind": (EAGLE, EAGLE3),
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
    """Greedy and seeded requests, and some that ask for all that there is; the ledger is exact and
    the KV canary silent in each step. Scores may be no numbers."""
    changes, budgets = dict(case), RandomBudgets(CASES.index(case))
    shape, disturb = SHAPES[changes.pop("shape")], changes.pop("disturb")
    with budgets.chosen():
        harness = tiled(paths, tmp_path, shape, **changes)
        harness.scramblers.append(budgets.scramble)
        ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
        harness.check()
        num_retractions = sum(harness.outputs[req_id].num_retractions for req_id in ids)
        if disturb is nothing and case["chunked_prefill_size"] == 6:
            check_all_that_requests_ask_for(harness, paths["target"])
    assert num_retractions or not case["retract_interval"]
    assert harness.seen["cut steps"] > 10
    assert harness.seen["fed"] > harness.seen["confirmed"] > 5, harness.seen
    num_drafts = most_right = shape
    if isinstance(shape, TreeShape):
        num_drafts, most_right = shape.num_drafts, shape.max_confirmed
    if case["tier_policy"] == "fixed":
        assert {count for count, _ in budgets.outcomes} == {num_drafts}
    assert all(0 <= right <= min(count, most_right) for count, right in budgets.outcomes)


@pytest.mark.long_matrix
@pytest.mark.parametrize("shape", [3, WIDE], ids=["chain", "tree"])
def test_where_rows_are_dear_only_likely_drafts_are_verified(
    paths: dict[str, Path], tmp_path: Path, shape: Shape
) -> None:
    """Goes by prices alone: nothing is forced. More of what is verified is right. Figures count the
    drafts that were fed."""
    found, right = {}, right_tokens(paths["target"])
    is_tree = isinstance(shape, TreeShape)
    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, folder, shape, prices=ROWS_COST_TIME if is_tree else DEAR_ROWS)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts() * 3)]
        harness.run()
        harness.check()
        outcomes = [harness.outputs[req_id] for req_id in ids]
        assert [outcome.token_ids for outcome in outcomes][: len(right)] == right
        num_right = sum(
            count * each
            for outcome in outcomes
            for count, each in enumerate(outcome.accept_histogram)
        )
        num_fed = sum(outcome.num_proposed_drafts for outcome in outcomes)
        state = harness.scheduler.control.internal_state()
        assert state["avg_spec_accept_rate"] == num_right / num_fed
        assert 0 < num_fed <= harness.seen["fed"]
        found[folder is None] = harness.seen
    assert found[False]["cut steps"] > 10
    assert 20 < found[False]["fed"] < 0.7 * found[True]["fed"]
    shares = {key: seen["confirmed"] / seen["fed"] for key, seen in found.items()}
    assert shares[False] > (1.5 if is_tree else 1.0) * shares[True]


@pytest.mark.long_matrix
def test_cut_steps_replay_graphs_for_trees_between_whole_rounds(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """Steps that are not cut are graphs as a whole, as without TileSpec."""
    has_prompts, replayed = list[bool](), list[bool]()

    def planned(batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        has_prompts.append(any(batch.num_prompt_tokens))
        return plan(batch, lens)

    def noted(batch: ForwardBatch) -> ForwardResult:
        result = forward(batch)
        if batch.q_starts is not None and not has_prompts[-1]:
            assert batch.ancestors is not None
            replayed.append(result.used_graph)
        return result

    with recorded_graphs(), replayable_backends(), RandomBudgets(3).chosen():
        setup = setup_of(max_decode_rows=1 + WIDE.num_drafts + WIDE.num_slots)
        options = {"tree": WIDE, "tile_spec_cache": tmp_path, "prices": DEAR_ROWS}
        served = serving(paths, EAGLE3, setup, **options)
        planner, target = served.harness.planner, served.group.target
        plan, forward = planner.plan, target.forward
        noting = mock.patch.object(target, "forward", noted)
        with noting, mock.patch.object(planner, "plan", planned):
            serve(served.harness, right_tokens(paths["target"]))
    assert len(replayed) > 10
    assert all(replayed)
    assert {count for _, count in served.rounds} == {WIDE.num_drafts}
