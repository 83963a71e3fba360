"""Rounds as graphs, as a CPU can have them: tokens, ledger and token table are those of steps
that run piece by piece, and everything that a graph cannot do runs so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE
from drafted_serving import Disturb, Drafted, abort, nothing, params_of, pause, prompts, serve
from eagle_models import CONTEXT, STANDALONE, eagle_config_for, write_models
from jumping_tier import JUMPING, RESTING, jumping_tiers
from mtp_oracle import load_reference
from recorded_graphs import recorded_graphs, replayable_backends
from request_choices import OFF, choose_in_turn
from round_serving import (
    NUM_STEPS,
    Served,
    right_tokens,
    runners,
    serving,
    setup_of,
    submit_all,
    zero,
)
from sglang.srt.control.memory_control import GRAPH_TAG
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.cut import LatencyTable, TileSpec
from sglang.srt.messages.control import MemoryOccupationReq
from sglang.srt.messages.requests import HiddenFileOptions, LogprobOptions
from sglang.srt.model_executor.model_runner import ForwardResult, ModelRunner
from sglang.srt.sampling.sampling_params import Speculative
from sglang.srt.speculative.drafter_options import AcceptThresholds
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.workers.round_graphs import RoundGraphs
from tile_spec_rounds import DEAR_ROWS, free_drafts

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


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
    ("kind", "page_size", "policy", "disturb"),
    [
        (EAGLE, 1, JUMPING, abort),
        (EAGLE, 16, "fixed", pause),
        (EAGLE3, 16, JUMPING, nothing),
        (EAGLE3, 1, RESTING, pause),
        (DFLASH, 16, JUMPING, abort),
    ],
)
def test_tokens(
    paths: dict[str, Path],
    right: list[list[int]],
    kind: str,
    page_size: int,
    policy: str,
    disturb: Disturb,
) -> None:
    served = serving(paths, kind, setup_of(page_size), policy)
    serve(served.harness, right, disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10
    assert served.num_pieces > 3
    assert (served.num_rests > 3) == (policy == RESTING)
    sizes = {count for count, _ in served.rounds}
    assert sizes - {1, 2, 4, 8}, "Some have padding."
    drafts = {count for _, count in served.rounds}
    assert len(drafts) > 1 if policy != "fixed" else drafts == {NUM_STEPS}


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE3, STANDALONE, P_EAGLE, DFLASH])
def test_requests_that_take_no_drafts(
    paths: dict[str, Path], right: list[list[int]], kind: str
) -> None:
    """Beside them, the others are proposed for by graphs of as many requests as these are."""
    served = serving(paths, kind)
    choose_in_turn(served.harness, (OFF, Speculative()))
    serve(served.harness, right)
    assert len(served.proposals) > 10
    num_proposals, num_eager = len(served.proposals), served.num_eager_proposals
    target, model = served.group.runners
    rounds, steps = len(served.rounds), list[tuple[int, bool]]()

    def forward(batch: ForwardBatch) -> ForwardResult:
        result = run(batch)
        if max(batch.q_lens) == 1:
            steps.append((len(batch.q_lens), result.used_graph))
        return result

    run = target.forward
    with (
        mock.patch.object(target, "forward", forward),
        mock.patch.object(model, "forward", side_effect=AssertionError("It has nothing to do.")),
    ):
        submit_all(served, speculative=OFF)
    assert (len(served.rounds), len(served.proposals)) == (rounds, num_proposals)
    assert served.num_eager_proposals == num_eager
    assert len(steps) > 5
    assert all(used_graph for _, used_graph in steps)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "page_size", "shape", "disturb"),
    [
        (EAGLE, 1, TreeShape(topk=4, depth=3, num_drafts=9), nothing),
        (EAGLE3, 16, TreeShape(topk=2, depth=4, num_drafts=5), abort),
        (EAGLE3, 1, TreeShape(topk=3, depth=1, num_drafts=3), pause),
    ],
)
def test_tokens_of_trees(
    paths: dict[str, Path],
    right: list[list[int]],
    kind: str,
    page_size: int,
    shape: TreeShape,
    disturb: Disturb,
) -> None:
    slots = 1 + shape.num_drafts + shape.num_slots
    served = serving(paths, kind, setup_of(page_size, max_decode_rows=slots), tree=shape)
    serve(served.harness, right, disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10
    assert served.num_pieces > 3
    assert {count for count, _ in served.rounds} - {1, 2, 4, 8}, "Some have padding."
    assert {count for _, count in served.rounds} == {shape.num_drafts}


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": LogprobOptions(start_len=-1, top_num=2)},
        {"frequency_penalty": 0.01},
        {"hidden_states": "all"},
    ],
    ids=["logprobs", "penalties", "hidden states"],
)
def test_what_a_graph_cannot_do_runs_piece_by_piece(
    paths: dict[str, Path], right: list[list[int]], asked: dict[str, Any]
) -> None:
    served = serving(paths)
    ids = submit_all(served, **asked)
    assert not served.rounds
    assert served.num_pieces > 10
    assert [served.harness.outputs[each].token_ids for each in ids] == right


@pytest.mark.parametrize(
    "tree", [None, pytest.param(TreeShape(3, 2, 7), marks=pytest.mark.long_matrix)], ids=str
)
@torch.inference_mode()
def test_graphs_give_hidden_states_of_layers_that_requests_may_have(
    paths: dict[str, Path], tree: TreeShape | None, tmp_path: Path
) -> None:
    """Those of transformers, of layers that the head does not read too."""
    reference = load_reference(paths["target"])
    layers = [4, 0, reference.config.num_hidden_layers]
    served = serving(paths, tree=tree, returned=(4, 0))
    ids = {}
    for index, prompt in enumerate(prompts()[:5]):
        (tmp_path / str(index)).touch()
        options = HiddenFileOptions(str(tmp_path / str(index)), layers)
        more = {"hidden_states": "all", "hidden_file": options}
        ids[served.harness.submit(prompt, **params_of(index), **more)] = prompt
    served.harness.run()
    assert len(served.rounds) > served.num_pieces > 0
    for index, (req_id, prompt) in enumerate(ids.items()):
        fed = torch.tensor([prompt + served.harness.outputs[req_id].token_ids[:-1]])
        states = reference.model(fed, output_hidden_states=True).hidden_states
        expected = torch.stack([states[layer][0] for layer in layers], dim=1)
        found = load_file(tmp_path / str(index))["hidden_states"]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_one_that_asks_for_more_takes_the_others_with_it_only_while_it_runs(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    served = serving(paths)
    harness = served.harness
    asking = harness.submit(prompts()[0], **params_of(0), logprobs=LogprobOptions(start_len=-1))
    others = [harness.submit(each, **params_of(i)) for i, each in enumerate(prompts())]
    while harness.outputs[asking].finish_reason is None:
        harness.step()
    before = len(served.rounds)
    harness.run()
    assert before <= 1, "One may have been launched before the end was read."
    assert len(served.rounds) > 2
    assert [harness.outputs[each].token_ids for each in others] == right


@pytest.mark.long_matrix
def test_graphs_are_captured_anew_with_memory(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    served = serving(paths, setup=setup_of(use_radix_cache=False))
    submit_all(served)
    before, num_rounds = dict(served.graphs._steps[NUM_STEPS, False]), len(served.rounds)
    served.group.memory.release()
    served.group.restore_kv()
    zero(served.group)
    after = served.graphs._steps[NUM_STEPS, False]
    assert before.keys() == after.keys()
    assert all(before[size].graph is not after[size].graph for size in after)
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right
    assert len(served.rounds) > num_rounds


@pytest.mark.long_matrix
def test_while_memory_is_released_there_are_none(paths: dict[str, Path]) -> None:
    served = serving(paths)
    group, graphs = served.group, served.graphs
    num_graphs = graphs.num_graphs, [runner.num_graphs for runner in group.runners]
    group.release_weights()
    group.memory.release()
    group.restore_kv()  # weights are still missing
    group.restore_graphs()
    assert graphs.num_graphs == 0
    group.restore_weights()
    assert num_graphs == (graphs.num_graphs, [runner.num_graphs for runner in group.runners])
    before = dict(graphs._steps[NUM_STEPS, False])
    group.restore_graphs()  # they are there
    assert graphs._steps[NUM_STEPS, False] == before
    held = [weakref.ref(each.graph) for each in before.values()]
    held += [weakref.ref(runner._graphs) for runner in group.runners]
    before.clear()
    gc.disable()  # a scheduler keeps what there is at its start out of collections
    try:
        served.harness.send(MemoryOccupationReq, action="release", tags=[GRAPH_TAG])
        assert not any(each() for each in held)
    finally:
        gc.enable()
    assert not group.has_graphs
    assert graphs.num_graphs == 0
    served.harness.send(MemoryOccupationReq, action="resume", tags=[GRAPH_TAG])
    assert num_graphs == (graphs.num_graphs, [runner.num_graphs for runner in group.runners])


@pytest.mark.long_matrix
def test_every_tier_has_graphs_that_serve_any_tier_before_and_behind_it(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    setup = setup_of(max_running_requests=12)
    served = serving(paths, setup=setup, policy=JUMPING)
    tiers, sizes = range(NUM_STEPS + 1), [1, 2, 4, 8, 12]
    graphs = served.graphs
    found = {kind.num_drafts: [*each] for kind, each in graphs._steps.items()}
    assert found == dict.fromkeys(tiers, sizes)
    assert {kind.num_drafts: [*each] for kind, each in graphs._proposals.items()} == dict.fromkeys(
        tiers[1:], sizes
    )
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right
    fed, given = ({count for _, count in each} for each in (served.rounds, served.proposals))
    assert fed == {*tiers}
    assert given == {*tiers[1:]}, "A head that is to draft nothing does nothing."


def test_with_checks_of_kv_there_is_none(paths: dict[str, Path]) -> None:
    served = serving(paths, checks_kv=True)
    served.harness.generate([prompts()[0]], **params_of(0))
    assert not served.rounds
    assert served.num_pieces > 3


def test_thresholds_are_for_pieces(paths: dict[str, Path]) -> None:
    drafter = eagle_config_for(paths["target"], paths[EAGLE], EAGLE, NUM_STEPS)
    drafter = replace(drafter, thresholds=AcceptThresholds(0.5, 0.5))
    harness = Drafted(runners(paths, drafter, setup_of()), drafter, setup_of())
    worker: Any = harness.scheduler._worker
    assert worker._rounds is None


def test_simulated_acceptance_goes_on_from_graph_to_graph(paths: dict[str, Path]) -> None:
    served = serving(paths, simulated_accept_len=2.5)
    params = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    [tokens] = served.harness.generate([prompts()[0]], **params)
    assert len(tokens) == 60
    drafts = served.seen["right"] / len(served.rounds)
    assert len(served.rounds) > 15
    assert abs(drafts - 1.5) < 0.1


@pytest.mark.long_matrix
def test_old_graphs_are_gone_before_new_ones_are_captured(paths: dict[str, Path]) -> None:
    """Or memory would have to hold both."""
    served, seen = serving(paths), list[int]()
    capture = ModelRunner.capture_graphs

    def note(runner: ModelRunner) -> None:
        others = (each.num_graphs for each in served.group.runners)
        seen.append(served.graphs.num_graphs + max(others))
        capture(runner)
        seen.append(runner.num_graphs)

    served.group.memory.release()
    with mock.patch.object(ModelRunner, "capture_graphs", note):
        served.group.restore_kv()
    assert seen[0] == 0
    assert min(seen[1::2]) > 0
    assert served.graphs.num_graphs > 0


def test_a_replay_without_memory_is_a_bug_that_shows(paths: dict[str, Path]) -> None:
    served = serving(paths, setup=setup_of(use_radix_cache=False))
    served.harness.submit(prompts()[0], **params_of(0))
    while not served.rounds:
        served.harness.step()
    served.group.memory.release()
    with pytest.raises(AssertionError, match="without a KV pool"):
        served.harness.run()


def all_drafts(table: LatencyTable, num_drafts: list[int], num_decodes: int) -> int:
    return sum(num_drafts)


@pytest.mark.long_matrix
def test_steps_whose_drafts_all_pay_replay_the_graphs_of_a_fixed_number(
    paths: dict[str, Path], tmp_path: Path, right: list[list[int]]
) -> None:
    """In the same order, though scores are looked at; tokens are the same."""
    found = []
    for folder in (None, tmp_path):
        counts = mock.patch.object(TileSpec, "num_verified", side_effect=all_drafts)
        with free_drafts(), counts as asked:
            served = serving(paths, tile_spec_cache=folder, prices=DEAR_ROWS)
            ids = submit_all(served)
        assert [served.harness.outputs[each].token_ids for each in ids] == right
        found.append((served.rounds, served.proposals, served.num_pieces, served.seen))
        assert asked.called == (folder is not None)
    assert found[0] == found[1]
    assert len(found[0][0]) > 10


def test_who_is_told_of_each_step_gets_no_graphs(paths: dict[str, Path]) -> None:
    drafter = eagle_config_for(paths["target"], paths[EAGLE], EAGLE, NUM_STEPS)
    group = runners(paths, drafter, setup_of())
    harness = Drafted(group, drafter, setup_of(), on_step=lambda step: None)
    worker: Any = harness.scheduler._worker
    assert worker._rounds is None


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_requests_that_are_retracted_all_the_time(
    paths: dict[str, Path], right: list[list[int]], kind: str
) -> None:
    served = serving(paths, kind, setup_of(16, retract_interval=4))
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right
    assert served.harness.scheduler.lifecycle.counts.num_retracted > 3
    assert len(served.rounds) > 1


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_end_of_the_context(paths: dict[str, Path], page_size: int) -> None:
    """Drafts are verified by graphs for as long as there are slots for all of them."""
    setup = setup_of(page_size, use_radix_cache=False)
    group = runners(paths, None, setup)
    plain, served = Drafted(group, None, setup), serving(paths, setup=setup)
    zero(group)
    found = []
    for harness in (plain, served.harness):
        ids = []
        for each, length in zip(prompts(), (90, 101, 117, 80), strict=False):
            prompt = each[:1] * length
            params = {"temperature": 0.0, "max_new_tokens": CONTEXT - length}
            ids.append(harness.submit(prompt, **params))
        harness.run()
        harness.check()
        found.append([harness.outputs[each].token_ids for each in ids])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [38, 27, 11, 48]
    assert len(served.rounds) > 10


@pytest.mark.long_matrix
def test_batches_are_padded_to_a_size_that_takes_less_time(
    paths: dict[str, Path], right: list[list[int]]
) -> None:
    served = serving(paths)
    target = served.group.target
    keys, sizes = target.graph_keys, [*served.graphs._steps[NUM_STEPS, False]]
    assert keys is not None
    several = {key: float(key.num_tokens) for key in keys.all if key.width > 1}
    rows = 2 * (1 + NUM_STEPS)
    dear = {key: 100.0 for key in several if key.num_tokens == rows}
    assert dear
    target.prefer_cheaper_graphs(several | dear)
    served.graphs.capture()
    assert [*served.graphs._steps[NUM_STEPS, False]] == [size for size in sizes if size != 2]
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right
    assert any(count == 2 for count, _ in served.rounds), "Two requests are padded to four."


# ---------------------------------------------------------------- proposals behind pieces


def histograms(served: Served) -> list[list[int]]:
    """Returns for each request how many of its steps confirmed 0, 1, ... drafts."""
    ids = submit_all(served, logprobs=LogprobOptions(start_len=-1))
    assert not served.rounds, "Verification is no graph."
    return [list(served.harness.outputs[each].accept_histogram) for each in ids]


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3, STANDALONE])
def test_proposals_that_are_graphs_are_what_pieces_would_propose(
    paths: dict[str, Path], kind: str
) -> None:
    """Tokens would be right with any drafts, so it is counted how many are."""
    setup = setup_of(use_radix_cache=False)
    by_graph = serving(paths, kind, setup)
    found = histograms(by_graph)
    assert len(by_graph.proposals) > 3
    with mock.patch.object(RoundGraphs, "_capture_proposals", return_value=None):
        by_pieces = serving(paths, kind, setup)
    right = histograms(by_pieces)
    assert not by_pieces.proposals
    assert found == right
    assert sum(map(sum, right)) > 10


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE3, STANDALONE])
def test_proposals_behind_prompts_are_graphs(paths: dict[str, Path], kind: str) -> None:
    served = serving(paths, kind)
    for _ in range(3):
        served.harness.submit(prompts()[0], **params_of(0))
    served.harness.step()
    assert served.num_pieces == 1
    assert served.proposals[:1] == [(3, NUM_STEPS)]
    assert not served.num_eager_proposals
