"""The kernels of draft trees on a GPU, on fresh inputs."""

from __future__ import annotations

import os

import pytest
import torch
from tree_oracle import Drafted, assert_ragged, drafted
from verification_oracle import (
    VerifyCase,
    assert_last_token,
    greedy_path,
    random_trees,
    sampled_path,
)

import sgl_kernel
from sgl_kernel import ConfirmedDrafts, RaggedTrees, TreeMaskMode

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

# Fresh inputs in every run; the value is printed with a failure, and setting it repeats the run.
BASE_SEED = int(os.environ.get("SGL_KERNEL_TEST_SEED", torch.seed() % 2**31))


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    print(f"SGL_KERNEL_TEST_SEED={BASE_SEED}")
    sgl_kernel.warm_up()


def build_uniform(case: Drafted, num_nodes: int, mode: TreeMaskMode) -> list[torch.Tensor]:
    """Mask, positions and links, on the device of the case."""
    num_requests, device = len(case.seq_lens), case.tokens.device
    sizes = {
        TreeMaskMode.FULL_MASK: int((num_nodes * (case.seq_lens + num_nodes)).sum()),
        TreeMaskMode.QLEN_ONLY: num_requests * num_nodes**2,
        TreeMaskMode.QLEN_ONLY_BITPACKING: num_requests
        * num_nodes
        * (1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4),
    }
    is_packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    mask = torch.ones(sizes[mode], dtype=torch.uint8 if is_packed else torch.bool, device=device)
    positions = torch.full((num_requests * num_nodes,), -7, device=device)
    links = [torch.full((num_requests, num_nodes), -7, device=device) for _ in range(3)]
    selected = case.selected(num_nodes).to(device)
    sgl_kernel.build_tree_kernel_efficient(
        *(case.parent_list, selected, case.seq_lens, mask, positions, *links),
        *(case.topk, case.depth, num_nodes, mode),
    )
    return [mask, positions, *links]


def on_cpu(result: RaggedTrees | ConfirmedDrafts) -> RaggedTrees | ConfirmedDrafts:
    return type(result)(*(part.cpu() for part in result))


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("num_nodes", [1, 2, 8, 16, 31, 32, 64, 1024])
def test_uniform_trees(num_nodes: int, mode: TreeMaskMode) -> None:
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and num_nodes > 32:
        pytest.skip("packed masks have 32 nodes")
    case = drafted(4 if num_nodes > 64 else 50, 12, 9, BASE_SEED)
    expected = build_uniform(case, num_nodes, mode)
    for part, own in zip(expected, build_uniform(case.to("cuda"), num_nodes, mode), strict=True):
        assert torch.equal(part, own.cpu())


@pytest.mark.parametrize(("topk", "depth"), [(1, 1), (1, 6), (4, 3), (8, 5), (10, 8)])
@pytest.mark.parametrize("num_requests", [1, 8, 64, 300])
def test_ragged_builds(num_requests: int, topk: int, depth: int) -> None:
    case = drafted(num_requests, topk, depth, BASE_SEED + num_requests)
    on_gpu = case.to("cuda")
    assert_ragged(case, on_cpu(sgl_kernel.build_ragged_trees(*on_gpu.flat(), case.num_rows)))


def check_sampled(case: VerifyCase, result: ConfirmedDrafts) -> None:
    for request in range(len(case.starts) - 1):
        path, refused = sampled_path(case, request)
        assert result.path[request].tolist() == path + [-1] * (case.max_kept - len(path))
        if path:
            assert_last_token(case, request, int(result.next_token[request]), path, refused)


@pytest.mark.parametrize("max_nodes", [1, 7, 33, 64, 600])
def test_ragged_verifications(max_nodes: int) -> None:
    case = random_trees(50, max_nodes, BASE_SEED + max_nodes)
    on_gpu = case.to("cuda")
    greedy = on_cpu(sgl_kernel.verify_ragged_trees(*on_gpu.ragged()))
    for request in range(50):
        path, token = greedy_path(case, request)
        assert greedy.path[request].tolist() == path + [-1] * (case.max_kept - len(path))
        assert greedy.next_token[request] == token
    check_sampled(case, on_cpu(sgl_kernel.sample_ragged_trees(*on_gpu.ragged_sampling())))


@pytest.mark.parametrize("size", [1, 513, 32001, 128256, 151937])
def test_sampling_from_large_vocabularies(size: int) -> None:
    case = random_trees(8, 6, BASE_SEED + size, size=size)
    on_gpu = case.to("cuda")
    check_sampled(case, on_cpu(sgl_kernel.sample_ragged_trees(*on_gpu.ragged_sampling())))


def uniform_results(case: VerifyCase, device: str) -> list[torch.Tensor]:
    """predicts, accept_index, accept_token_num of the greedy op, then of the sampling one."""
    moved = case.to(device)
    trees = tuple(part.to(device) for part in case.uniform_trees())
    num_requests, num_nodes = trees[0].shape
    results = []
    for _ in range(2):
        results += [
            torch.full((num_requests * num_nodes,), -7, dtype=torch.int32, device=device),
            torch.full((num_requests, case.max_kept), -7, dtype=torch.int32, device=device),
            torch.full((num_requests,), -7, dtype=torch.int32, device=device),
        ]
    sgl_kernel.verify_tree_greedy(*results[:3], *trees, moved.targets.view(trees[0].shape))
    probs = moved.probs.view(num_requests, num_nodes, -1)
    sgl_kernel.tree_speculative_sampling_target_only(
        *(*results[3:], *trees, moved.coins.view(trees[0].shape), moved.final_coins),
        *(probs, torch.zeros_like(probs)),
    )
    return [result.cpu() for result in results]


@pytest.mark.parametrize("num_nodes", [1, 8, 64])
def test_uniform_verifications_are_the_references(num_nodes: int) -> None:
    case = random_trees(40, num_nodes, BASE_SEED, num_nodes=num_nodes)
    expected, results = (uniform_results(case, device) for device in ("cpu", "cuda"))
    for part, own in zip(expected[:3], results[:3], strict=True):
        assert torch.equal(part, own)
    # The last token may differ where a float32 sum is at the coin, so the paths are compared.
    assert torch.equal(expected[4], results[4])
    assert torch.equal(expected[5], results[5])


def test_a_graph_of_build_and_verification_sees_changed_inputs() -> None:
    case = drafted(30, 8, 4, BASE_SEED, num_nodes=20)
    on_gpu = case.to("cuda")
    targets = torch.randint(0, 10, (case.num_rows,), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built = sgl_kernel.build_ragged_trees(*on_gpu.flat(), case.num_rows)
        links = (built.first_child, built.next_sibling)
        by_links = sgl_kernel.verify_ragged_trees(built.tokens, targets, *links, built.starts, 20)
    fresh = drafted(30, 8, 4, BASE_SEED + 1)
    for old, new in zip(on_gpu.flat(), fresh.flat(), strict=True):
        old.copy_(new.clamp(max=20) if new is fresh.num_nodes else new)
    graph.replay()
    expected = sgl_kernel.build_ragged_trees(*(part.cpu() for part in on_gpu.flat()), case.num_rows)
    assert all(torch.equal(*pair) for pair in zip(on_cpu(built), expected, strict=True))
    by_parents = sgl_kernel.confirm_drafts(
        expected.tokens,
        targets.cpu(),
        expected.parents,
        expected.starts,
        expected.starts.diff(),
        20,
    )
    assert all(torch.equal(*pair) for pair in zip(on_cpu(by_links), by_parents, strict=True))
