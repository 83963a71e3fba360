"""STANDALONE with graphs of both models, rounds as graphs, tiers that change and steps that
verify some of the drafts: tokens are those of a plain server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafted_serving import Disturb, abort, nothing, params_of, pause, prompts, serve
from eagle_models import STANDALONE, write_draft, write_target
from eagle_serving import Served, setup_for
from eagle_serving import right_tokens as plain_tokens
from jumping_tier import JUMPING, jumping_tiers
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import NUM_STEPS, ON_CPU, right_tokens, serving, setup_of, submit_all
from sglang.srt.layers.forward_batch import DECODE, MIXED, RAGGED
from sglang.srt.lookahead.adaptive_config import parse_adaptive_config
from tile_spec_rounds import DEAR_ROWS, RandomBudgets

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("standalone")
    return {
        "target": write_target(folder / "target"),
        STANDALONE: write_draft(folder / STANDALONE),
    }


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends(), jumping_tiers():
        yield


@pytest.fixture(scope="module")
def right(paths: dict[str, Path]) -> list[list[int]]:
    with recorded_graphs(), replayable_backends():
        return right_tokens(paths)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("page_size", "policy", "disturb"),
    [(1, JUMPING, abort), (16, "fixed", pause), (16, JUMPING, nothing)],
)
def test_whole_rounds_are_graphs(
    paths: dict[str, Path], right: list[list[int]], page_size: int, policy: str, disturb: Disturb
) -> None:
    served = serving(paths, STANDALONE, setup_of(page_size), policy)
    serve(served.harness, right, disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10
    assert served.num_pieces > 3
    drafts = {count for _, count in served.rounds}
    assert len(drafts) > 1 if policy == JUMPING else drafts == {NUM_STEPS}


@pytest.mark.long_matrix
def test_rounds_of_a_draft_model_that_is_the_target_confirm_all_drafts(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    """KV that it reads in a graph is that of the true sequence."""
    twins = {"target": paths["target"], STANDALONE: paths["target"]}
    served = serving(twins, STANDALONE)
    harness = served.harness
    greedy = [index for index in range(len(right)) if index % 3 != 2]
    ids = [harness.submit(prompts()[index], **params_of(index)) for index in greedy]
    harness.run()
    assert [harness.outputs[each].token_ids for each in ids] == [right[index] for index in greedy]
    assert served.seen["right"] > 20
    assert served.seen["wrong"] == 0


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("backend", "page_size", "policy"), [("ragged", 16, JUMPING), ("uniform", 1, "fixed")]
)
def test_steps_that_run_piece_by_piece_replay_graphs_of_both_models(
    paths: dict[str, Path], right: list[list[int]], backend: str, page_size: int, policy: str
) -> None:
    """KV is checked in each step, so no round is a graph."""
    served = serving(
        paths,
        STANDALONE,
        setup_of(page_size),
        policy,
        ON_CPU._replace(backend=backend),
        checks_kv=True,
    )
    serve(served.harness, right)
    assert not served.rounds
    draft = served.group.runners[1]
    assert draft.num_graphs > 10


@pytest.mark.long_matrix
def test_graphs_of_the_draft_model_compute_one_row_of_each_request(paths: dict[str, Path]) -> None:
    """Checks that graphs compute one row of several that a request is fed. Draft steps have graphs
    for as many drafts, and for one less."""
    served = serving(paths, STANDALONE)
    target, draft = served.group.runners
    assert draft.graph_keys is not None
    assert target.graph_keys is not None
    for key in draft.graph_keys.all:
        assert key.hidden_width == 0
        assert key.reads_one_row == (key.tag != DECODE)
    assert {key.tag for key in draft.graph_keys.all} == {DECODE, RAGGED, MIXED}
    assert not any(key.reads_one_row for key in target.graph_keys.all)
    assert sorted(draft.draft_graph_keys) == [NUM_STEPS - 1, NUM_STEPS]
    assert not target.draft_graph_keys


@pytest.mark.long_matrix
def test_requests_that_are_retracted_all_the_time(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    served = serving(paths, STANDALONE, setup_of(16, retract_interval=4))
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right
    assert served.harness.scheduler.lifecycle.counts.num_retracted > 3
    assert len(served.rounds) > 1


@pytest.mark.long_matrix
@pytest.mark.parametrize("policy", ["fixed", JUMPING])
def test_tile_spec_leaves_drafts_out(paths: dict[str, Path], tmp_path: Path, policy: str) -> None:
    budgets = RandomBudgets(1)
    options = {"tile_spec_cache": tmp_path, "tier_policy": policy, "prices": DEAR_ROWS}
    with budgets.chosen():
        harness = Served(paths, STANDALONE, 3, setup_for(3), **options)
        harness.scramblers.append(budgets.scramble)
        serve(harness, plain_tokens(paths["target"]))
    assert harness.seen["cut steps"] > 10
    assert harness.seen["fed"] > harness.seen["confirmed"] > 5, harness.seen


@pytest.mark.long_matrix
def test_adaptive_steps_change_while_requests_run(paths: dict[str, Path]) -> None:
    """Each round decides, by the last one alone."""
    each_round = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}
    restless = {"up_hysteresis": -0.25, "down_hysteresis": 0.25}
    slots = {"1": {"candidate_steps": [0, 1, 2, 3]}, "3": {"candidate_steps": [0, 1, 3]}}
    adaptive = parse_adaptive_config(json.dumps(each_round | restless | slots).encode(), "FILE")
    options = {"tier_policy": "adaptive", "initial_steps": 2, "adaptive": adaptive}
    harness = Served(paths, STANDALONE, 3, setup_for(3, chunked_prefill_size=16), **options)
    right = plain_tokens(paths["target"])
    serve(harness, right)
    for index, prompt in enumerate(prompts()):
        assert harness.generate([prompt], **params_of(index)) == [right[index]]
    assert all(harness.tiers[tier] > 2 for tier in range(4)), harness.tiers
