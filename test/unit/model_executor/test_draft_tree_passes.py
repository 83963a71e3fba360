"""Trees that a head drafts in one pass: with graphs and without, and what they have in common with
chains. What beams find is compared in `test_eagle_drafts.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from draft_tree_cases import CASES, copied, first_step, write_folders
from head_rounds import HIDDEN_SIZE, MAX_REQUESTS, MAX_ROWS, make_head
from interpreted import run_interpreted
from recorded_graphs import RecordedGraph, recorded_graphs, replayable_backends
from sgl_kernel import argmax_logprob
from sglang.srt.layers.forward_batch import DRAFT_STEPS, ForwardBatch
from sglang.srt.model_executor.draft_passes import Drafts
from sglang.srt.model_executor.draft_tree_passes import _best_nodes, _Found
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.step.draft_shapes import TreeShape

BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
SHAPES = (
    TreeShape(topk=2, depth=4, num_drafts=7),
    TreeShape(topk=3, depth=3, num_drafts=21),
    TreeShape(topk=4, depth=1, num_drafts=3),
)
TOLERANCE = 1e-3
CHAIN, NUM_STEPS = TreeShape(topk=1, depth=4, num_drafts=4), 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends():
        yield


@cache
def head(folders: Path, kind: str, backend: str = "ragged", graphs: bool = True) -> ModelRunner:
    return make_head(
        folders / "target",
        folders / kind,
        kind,
        16,
        (*SHAPES, CHAIN, NUM_STEPS),
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        max_graph_width=MAX_ROWS if graphs else 0,
        poisons_graphs=graphs,
    )


@pytest.mark.long_matrix
@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [[0], [4, 1, 2], list(range(8)), list(range(9))], ids=len)
def test_a_graph_gives_what_its_steps_do(
    folders: Path, kind: str, shape: TreeShape, rows: list[int]
) -> None:
    """Trees, and KV of all rows; inputs and results are overwritten before each replay."""
    graphs, eager = head(folders, kind), head(folders, kind, "torch_native", graphs=False)
    first = first_step(graphs, rows)
    replay = RecordedGraph.replay
    with mock.patch.object(RecordedGraph, "replay", autospec=True, side_effect=replay) as replays:
        found = copied(graphs.draft_trees(first, shape))
    assert replays.call_count == 1
    first = first_step(eager, rows)
    right = eager.draft_trees(first, shape)
    for name in ("token_ids", "parents", "fed_ids", "ancestors", "slots"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name
    torch.testing.assert_close(found.scores, right.scores, rtol=TOLERANCE, atol=TOLERANCE)
    mine, his = (runner.kv_pool.kv[0][right.slots.flatten()] for runner in (graphs, eager))
    torch.testing.assert_close(mine, his, rtol=TOLERANCE, atol=TOLERANCE)
    table = graphs.req_to_token_pool.req_to_token
    for index, row in enumerate(rows):
        columns = first.positions[index] + torch.arange(shape.num_fed)
        assert torch.equal(right.slots[:, index].flatten(), table[row, columns].long())


@pytest.mark.long_matrix
@BOTH
@pytest.mark.parametrize("has_graphs", [True, False])
def test_a_tree_of_one_branch_has_the_tokens_and_kv_of_the_chain_bit_for_bit(
    folders: Path, kind: str, has_graphs: bool
) -> None:
    runner, rows = head(folders, kind, graphs=has_graphs), [3, 0, 5]
    first = first_step(runner, rows)
    trees = copied(runner.draft_trees(first, CHAIN))
    kv = runner.kv_pool.kv[0].clone()
    first = first_step(runner, rows)
    assert first.hidden is not None
    columns, _, logprobs = argmax_logprob(runner.compute_logits(first.hidden))
    assert isinstance(runner.model, DraftHead)
    best = runner.model.to_target_ids(columns)
    first = replace(first, input_ids=best)
    chain = Drafts(*(values.clone() for values in runner.draft(first, NUM_STEPS)))
    assert torch.equal(trees.token_ids, torch.cat((best[:, None], chain.token_ids), 1))
    scores = torch.cat((logprobs[:, None], chain.logprobs), 1).exp().cumprod(1)
    torch.testing.assert_close(trees.scores, scores)  # products, in another order
    assert torch.equal(trees.parents, torch.arange(4, dtype=torch.int32).expand(3, 4))
    assert torch.equal(kv, runner.kv_pool.kv[0])


@pytest.mark.long_matrix
@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_keep_the_contract(folders: Path, kind: str, shape: TreeShape) -> None:
    """Parents come first, scores fall, siblings differ, and no tree is too deep."""
    trees = head(folders, kind).draft_trees(first_step(head(folders, kind), [2, 6]), shape)
    assert trees.token_ids.shape == trees.parents.shape == (2, shape.num_drafts)
    assert trees.fed_ids.shape == trees.ancestors.shape == (shape.num_steps, 2, shape.topk)
    for tokens, parents, scores in zip(*(each.tolist() for each in trees[:3]), strict=True):
        assert scores == sorted(scores, reverse=True)
        depths, seen = [0], set()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            assert 0 <= parent < node
            depths.append(depths[parent] + 1)
            seen.add((parent, token))
        assert len(seen) == len(tokens)
        assert max(depths) <= shape.depth


def test_with_equal_scores_a_parent_comes_before_its_children() -> None:
    """Whatever they are, zero and no number too."""
    chooser = random.Random(0)
    for _ in range(200):
        topk, depth = chooser.choice([2, 3]), chooser.choice([2, 3, 4])
        values = chooser.choice([[1.0], [0.0, 1.0], [0.5, 1.0], [float("nan"), 1.0]])
        found, scores, numbers = [], [], list(range(topk))
        level = [(-1, chooser.choice(values)) for _ in range(topk)]
        for index in range(depth):
            if index:
                beam = chooser.sample(numbers, topk)
                level = [
                    (parent, scores[parent] * chooser.choice(values))
                    for parent in sorted(beam)
                    for _ in range(topk)
                ]
                numbers = list(range(len(scores), len(scores) + topk**2))
            parents, chances = zip(*level, strict=True)
            scores += chances
            found.append(
                _Found(
                    torch.zeros(1, len(level), dtype=torch.int64),
                    torch.tensor([chances]),
                    torch.tensor([parents]),
                )
            )
        num_drafts = chooser.randint(1, len(scores))
        _, nodes, told = _best_nodes(found, num_drafts)
        known = sorted((0.0 if score != score else score for score in scores), reverse=True)
        assert told[0].tolist() == known[:num_drafts]
        assert all(0 <= parent <= number for number, parent in enumerate(nodes[0].tolist()))


def test_checks_see_each_step_of_a_graph(folders: Path) -> None:
    """As the KV canary does: what each step was fed, where it wrote and what it saw."""
    shape, seen = SHAPES[0], list[list[ForwardBatch]]()
    for runner in (head(folders, EAGLE), head(folders, EAGLE, "torch_native", graphs=False)):
        seen.append([])
        runner.checks.append(seen[-1].append)
        try:
            runner.draft_trees(first_step(runner, [5, 0]), shape)
        finally:
            runner.checks.clear()
    mine, his = seen
    assert len(mine) == len(his) == shape.num_steps
    names = "input_ids", "positions", "slots", "rows", "kv_lens", "ancestors", "tree_starts"
    for left, right in zip(mine, his, strict=True):
        for name in names:
            assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert left.kv_len_upper_bounds == right.kv_len_upper_bounds
        assert left.q_lens == right.q_lens == [shape.topk] * 2


def test_each_shape_has_a_graph_for_every_number_of_requests(folders: Path) -> None:
    keys = head(folders, EAGLE3).draft_graph_keys
    assert set(keys) == {*SHAPES, CHAIN, NUM_STEPS}
    for shape in SHAPES:
        assert [key.num_reqs for key in keys[shape].all] == [1, 2, 4, 8, MAX_REQUESTS]
        found = {(key.tag, key.num_steps, key.hidden_width) for key in keys[shape].all}
        assert found == {(DRAFT_STEPS, shape.num_steps, HIDDEN_SIZE)}


def test_a_backend_that_plans_on_the_host_drafts_step_by_step(folders: Path) -> None:
    shape, uniform = SHAPES[0], head(folders, EAGLE3, "uniform")
    assert uniform.draft_graph_keys == {}
    found = copied(uniform.draft_trees(first_step(uniform, [1, 7, 2]), shape))
    eager = head(folders, EAGLE3, "torch_native", graphs=False)
    right = eager.draft_trees(first_step(eager, [1, 7, 2]), shape)
    assert torch.equal(found.token_ids, right.token_ids)
    assert torch.equal(found.parents, right.parents)


@pytest.mark.parametrize(
    ("topk", "depth", "num_drafts", "said"),
    [
        (2, 2, 7, "find 6 drafts, fewer than the 7"),
        (0, 1, 1, "at least one draft"),
        (4, 18, 8, "68 rows of draft steps and 9 rows to verify: masks have 64 bits"),
        (8, 3, 64, "65 rows to verify"),
    ],
)
def test_shapes_that_cannot_be_had_are_refused(
    topk: int, depth: int, num_drafts: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TreeShape(topk, depth, num_drafts)


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/draft_tree_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_draft_the_same_trees(
    errors: dict[str, float | str], case: str
) -> None:
    assert float(errors[case]) < TOLERANCE
