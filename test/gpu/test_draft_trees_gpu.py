"""Trees of drafts on a CUDA GPU: graphs equal steps without, tokens are those of a server without a
head, and nothing waits for the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from draft_tree_cases import copied, first_step, write_folders
from drafted_serving import abort, nothing, params_of, prompts, serve
from eagle_models import write_models
from head_rounds import MAX_ROWS, make_head
from path_rows_cases import CASES as PATHS
from path_rows_cases import wrong_parts as wrong_path_rows
from round_serving import On, right_tokens, serving, setup_of
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.triton_tree_search import triton_tree_search
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.triton_kept_paths import triton_path_rows
from sglang.srt.step.draft_shapes import TreeShape
from tile_spec_rounds import DEAR_ROWS, RandomBudgets
from tree_search_cases import RARE, arguments_of, children, wrong_parts
from tree_search_cases import SHAPES as FOUND

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

ON_GPU = On("cuda", "triton")
BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
SHAPES = (TreeShape(2, 4, 7), TreeShape(4, 5, 15), TreeShape(8, 3, 63), TreeShape(4, 1, 3))
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@cache
def head(folders: Path, kind: str, has_graphs: bool) -> ModelRunner:
    return make_head(
        *(folders / "target", folders / kind, kind, 16, SHAPES),
        device="cuda",
        dtype="float32",
        attention_backend="triton",
        max_graph_width=MAX_ROWS if has_graphs else 0,
        poisons_graphs=has_graphs,
    )


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_gives_what_its_steps_do(folders: Path, kind: str, shape: TreeShape) -> None:
    graphs, eager = head(folders, kind, True), head(folders, kind, False)
    assert shape in graphs.draft_graph_keys
    num_same = 0
    for rows in ([0], [4, 1, 2], list(range(8)), list(range(9))):
        found = copied(graphs.draft_trees(first_step(graphs, rows), shape))
        right = eager.draft_trees(first_step(eager, rows), shape)
        assert torch.equal(found.slots, right.slots)
        torch.testing.assert_close(found.scores, right.scores, rtol=TOLERANCE, atol=TOLERANCE)
        num_same += int((found.token_ids == right.token_ids).all(1).sum())
    assert num_same >= 20  # of 21; others are near-ties


@BOTH
def test_the_host_waits_for_nothing(folders: Path, kind: str) -> None:
    graphs, shape = head(folders, kind, True), SHAPES[1]
    first = first_step(graphs, [1, 2, 0])
    graphs.draft_trees(first, shape)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs.draft_trees(first, shape)
        head(folders, kind, False).draft_trees(first, shape)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("kind", "page_size", "shape", "checks_kv"),
    [
        (EAGLE, 1, TreeShape(4, 3, 9), False),
        (EAGLE3, 16, TreeShape(2, 4, 5), False),
        (EAGLE, 16, TreeShape(8, 4, 63), False),
        (EAGLE3, 1, TreeShape(4, 3, 9), True),
    ],
)
def test_tokens(
    paths: dict[str, Path], kind: str, page_size: int, shape: TreeShape, checks_kv: bool
) -> None:
    """As whole rounds, and piece by piece, as with checks of KV."""
    setup = setup_of(page_size, max_decode_rows=1 + shape.num_drafts + shape.num_slots)
    served = serving(paths, kind, setup, on=ON_GPU, tree=shape, checks_kv=checks_kv)
    disturb = abort if page_size == 16 else nothing
    serve(served.harness, right_tokens({"target": paths["target"]}, ON_GPU), disturb)
    assert bool(served.rounds) != checks_kv
    if served.rounds:
        assert served.seen["right"] > 10
        assert served.seen["wrong"] > 10


@BOTH
def test_tokens_where_some_nodes_are_verified(
    paths: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Cut steps replay graphs for trees, between whole rounds."""
    shape, budgets, replayed = TreeShape(4, 3, 9), RandomBudgets(3), list[bool]()
    setup = setup_of(max_decode_rows=1 + shape.num_drafts + shape.num_slots)

    def note(step: ComputedStep) -> None:
        if step.plan.counts.packed is not None and not any(step.batch.num_prompt_tokens):
            replayed.append(step.forward.used_graph)

    with budgets.chosen():
        options = {"tree": shape, "tile_spec_cache": tmp_path, "prices": DEAR_ROWS}
        served = serving(paths, kind, setup, on=ON_GPU, **options)
        served.harness.scheduler._worker._on_step = note
        serve(served.harness, right_tokens({"target": paths["target"]}, ON_GPU))
    assert len(replayed) > 10
    assert all(replayed)
    assert served.rounds


def test_rounds_neither_wait_nor_allocate(paths: dict[str, Path]) -> None:
    shape = TreeShape(4, 3, 9)
    setup = setup_of(max_decode_rows=1 + shape.num_drafts + shape.num_slots)
    served = serving(paths, setup=setup, on=ON_GPU, tree=shape)
    harness = served.harness
    params = params_of(0) | {"max_new_tokens": 90, "ignore_eos": True}
    for each in prompts()[:5]:
        harness.submit(each[:9], **params)
    while len(served.rounds) < 3:
        harness.step()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for _ in range(8):
        harness.step()
    torch.cuda.synchronize()
    assert len(served.rounds) > 8
    assert abs(torch.cuda.memory_allocated() - allocated) < 1 << 16
    harness.run()


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        *((count, "few values") for count in (1, 2, 7, 64, 128)),
        *((count, "no numbers") for count in (2, 64)),
        *((count, "any values") for count in (1, 2, 7)),  # many requests have near-ties
    ],
)
@pytest.mark.parametrize("shape", [*FOUND, *RARE], ids=str)
def test_kernels_find_the_trees_that_torch_does(shape: TreeShape, count: int, kind: str) -> None:
    assert wrong_parts(triton_tree_search, shape, count, kind, "cuda") == []


@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 20])
def test_a_graph_of_a_search_sees_changed_children(topk: int) -> None:
    """All of a search is captured, and nothing of it waits for the device."""
    shape, count = TreeShape(topk, 4 if topk < 20 else 2, 4), 7
    arguments = arguments_of(shape, count, "cuda")
    first = arguments[-1]
    given = [
        tuple(each.cuda() for each in children(rows, topk, "any values", torch.Generator()))
        for rows in (count, *(count * topk,) * shape.num_steps)
    ]

    def search() -> list[torch.Tensor]:
        found, hidden, fed = triton_tree_search(*arguments), first.hidden, []
        for ids, logprobs in given:
            step = found.grow(ids, logprobs, hidden)
            if step is not None:
                hidden = step.hidden
                fed += [step.input_ids, step.positions, step.kv_lens, hidden]
        return [*found.trees(), *fed]

    search()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = search()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for ids, logprobs in given:
            fresh = children(len(ids), topk, "any values", generator)
            ids.copy_(fresh[0])
            logprobs.copy_(fresh[1])
        graph.replay()
        for mine, right in zip(captured, search(), strict=True):
            assert torch.equal(mine, right)


@pytest.mark.parametrize("case", PATHS)
def test_a_kernel_finds_the_rows_of_confirmed_paths(case: str) -> None:
    assert wrong_path_rows(triton_path_rows, *PATHS[case], "cuda") == []
