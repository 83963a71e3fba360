"""Steps that verify some of the drafts: tokens stay, whichever are left out."""

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
)
from jumping_tier import JUMPING, jumping_tiers
from pairwise import name_of, pairwise_cases
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.step_ops import Q_LEN
from tile_spec_rounds import DEAR_ROWS, FREE_ROWS, RandomBudgets, free_drafts

torch.set_num_threads(1)
NUM_SEEDS = int(os.environ.get("TILE_SPEC_SEEDS", "2"))  # 200 by hand
KINDS = (EAGLE, EAGLE3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("tiled"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "num_steps": (1, 3, 5),
    "tier_policy": ("fixed", JUMPING),
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "chunked_prefill_size": (6, 2048),
    "memory": ("ample", "retracts"),
    "disturb": (nothing, pause, abort),
}
CASES = pairwise_cases(CHOICES)


def tiled(
    paths: dict[str, Path], kind: str, num_steps: int, folder: Path | None, **changes: Any
) -> Served:
    options = {"tier_policy": changes.pop("tier_policy", "fixed"), "tile_spec_cache": folder}
    prices = changes.pop("prices", DEAR_ROWS)
    setup = setup_for(num_steps, **changes)
    return Served(paths, kind, num_steps, setup, prices=prices, **options)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter_whichever_drafts_are_left_out(
    paths: dict[str, Path], tmp_path: Path, case: dict[str, Any]
) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step."""
    changes = dict(case)
    kind, num_steps, memory, disturb = (
        changes.pop(key) for key in ("kind", "num_steps", "memory", "disturb")
    )
    changes["retract_interval"] = 3 if memory == "retracts" else 0
    budgets = RandomBudgets(CASES.index(case))
    with budgets.chosen():
        harness = tiled(paths, kind, num_steps, tmp_path, **changes)
        harness.scramblers.append(budgets.scramble)
        serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    harness.check()
    assert harness.seen["cut steps"] > 10
    assert harness.seen["fed"] > harness.seen["confirmed"] > 5, harness.seen
    if case["tier_policy"] == "fixed":
        assert {count for count, _ in budgets.outcomes} == {num_steps}
    assert all(0 <= right <= count for count, right in budgets.outcomes)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_seed_of_random_counts_aborts_and_retractions_changes_a_token(
    paths: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    chooser = random.Random(seed)
    disturb = chooser.choice([nothing, pause, abort])
    changes = {"tier_policy": JUMPING, "retract_interval": chooser.choice([0, 3, 5])}
    budgets = RandomBudgets(seed)
    with budgets.chosen():
        harness = tiled(paths, KINDS[seed % 2], 3, tmp_path, **changes)
        harness.scramblers.append(budgets.scramble)
        serve(harness, right_tokens(paths["target"]), disturb, seed=seed)
    harness.check()
    assert harness.seen["cut steps"] > 5


def test_counts_of_0_and_of_all_drafts_are_in_one_step(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """And some between."""
    fed = list[list[int]]()

    def note(step: ComputedStep) -> None:
        if step.plan.counts.packed is not None:
            fed.append((step.chosen.layout.per_request[Q_LEN] - 1).tolist())

    budgets = RandomBudgets(0)
    with budgets.chosen():
        harness = tiled(paths, EAGLE, 3, tmp_path)
        harness.listeners.append(note)
        harness.scramblers.append(budgets.scramble)
        serve(harness, right_tokens(paths["target"]))
    assert any({0, 3} <= {*counts} for counts in fed)
    assert any({1, 2} & {*counts} for counts in fed)


@pytest.mark.long_matrix
def test_all_that_requests_ask_for_is_what_they_get_without_a_head(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    with RandomBudgets(1).chosen():
        harness = tiled(paths, EAGLE, 3, tmp_path, chunked_prefill_size=5)
        check_all_that_requests_ask_for(harness, paths["target"])
    assert harness.seen["cut steps"] > 10


def test_where_rows_cost_nothing_steps_are_those_without_tile_spec(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """And nothing is copied from the device."""
    plans = []

    def note(step: ComputedStep) -> None:
        plans[-1].append((step.plan, step.inputs.input_ids.tolist()))

    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, EAGLE3, 3, folder, prices=FREE_ROWS)
        plans.append([])
        harness.listeners.append(note)
        serve(harness, right_tokens(paths["target"]))
        assert harness.seen["cut steps"] == 0
    assert plans[0] == plans[1]
    assert not any(plan.wants_scores for plan, _ in plans[1])


def test_where_rows_are_dear_only_likely_drafts_are_verified(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """By prices alone: nothing is forced. More of what is verified is right."""
    found = {}
    for folder in (None, tmp_path):
        with free_drafts():
            harness = tiled(paths, EAGLE, 3, folder, prices=DEAR_ROWS)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts() * 3)]
        harness.run()
        harness.check()
        right = right_tokens(paths["target"])
        assert [harness.outputs[req_id].token_ids for req_id in ids][: len(right)] == right
        found[folder is None] = harness.seen
    assert found[False]["cut steps"] > 10
    assert found[False]["fed"] < 0.7 * found[True]["fed"]
    shares = {key: seen["confirmed"] / seen["fed"] for key, seen in found.items()}
    assert shares[False] > shares[True]


def test_probabilities_of_drafts_that_are_no_numbers_change_no_token(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """Of one request, by prices alone."""

    def spoil(step: ComputedStep) -> None:
        assert step.state.confidence is not None
        step.state.confidence.drafts[1] = math.nan

    with free_drafts():
        harness = tiled(paths, EAGLE, 3, tmp_path, prices=DEAR_ROWS)
    harness.scramblers.append(spoil)
    serve(harness, right_tokens(paths["target"]))
    harness.check()
    assert harness.seen["cut steps"] > 10


def test_figures_count_the_drafts_that_were_fed(paths: dict[str, Path], tmp_path: Path) -> None:
    with RandomBudgets(2).chosen():
        harness = tiled(paths, EAGLE, 3, tmp_path)
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
