"""Greedy verification of draft trees: the torch reference and the kernel on emulated threads."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from emulated_trees import EmulatedTrees
from tree_oracle import drafted
from verification_oracle import VerifyCase, greedy_path, random_trees

import sgl_kernel
from sgl_kernel import ConfirmedDrafts

Ops = ModuleType | EmulatedTrees


def check_ragged(case: VerifyCase, result: ConfirmedDrafts) -> None:
    assert [part.dtype for part in result] == [torch.int64, torch.int32, torch.int64]
    expected = [greedy_path(case, request) for request in range(len(case.starts) - 1)]
    padded = [path + [-1] * (case.max_kept - len(path)) for path, _ in expected]
    assert result.path.tolist() == padded
    assert result.num_confirmed.tolist() == [max(len(path) - 1, 0) for path, _ in expected]
    assert result.next_token.tolist() == [token for _, token in expected]


def verify_uniform(
    ops: Ops, case: VerifyCase, trees: tuple[torch.Tensor, ...], targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """predicts, accept_index and accept_token_num, with poison where nothing is written."""
    num_requests, num_nodes = trees[0].shape
    results = (
        torch.full((num_requests * num_nodes,), -7, dtype=torch.int32),
        torch.full((num_requests, case.max_kept), -7, dtype=torch.int32),
        torch.full((num_requests,), -7, dtype=torch.int32),
    )
    ops.verify_tree_greedy(*results, *trees, targets)
    return results


def check_uniform(case: VerifyCase, results: tuple[torch.Tensor, ...], rows: list[int]) -> None:
    """rows: of each node of all requests."""
    predicts = [-7] * len(case.tokens)
    for request, index in enumerate(results[1].tolist()):
        path, token = greedy_path(case, request)
        start = int(case.starts[request])
        kept = [rows[start + node] for node in path]
        assert index == kept + [-1] * (case.max_kept - len(kept))
        assert results[2][request] == len(path) - 1
        behind = [*(int(case.tokens[start + node]) for node in path[1:]), token]
        for row, value in zip(kept, behind, strict=True):
            predicts[row] = value
    assert results[0].tolist() == predicts


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 31, 32, 33, 64, 200])
def test_ragged_trees(trees: Ops, max_nodes: int) -> None:
    case = random_trees(30, max_nodes, seed=max_nodes, size=3)
    check_ragged(case, trees.verify_ragged_trees(*case.ragged()))


def test_random_trees_of_many_shapes(trees: Ops) -> None:
    lengths = set()
    for seed in range(100):
        case = random_trees(6, 1 + seed % 12, seed, size=3)
        case = replace(case, max_kept=1 + seed % 7)
        result = trees.verify_ragged_trees(*case.ragged())
        check_ragged(case, result)
        lengths |= set(result.num_confirmed.tolist())
    assert lengths >= set(range(5)), "the cases confirm too little to tell much"


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 33, 64, 1024])
def test_uniform_trees_are_the_ragged_ones(trees: Ops, num_nodes: int) -> None:
    case = random_trees(3 if num_nodes > 64 else 20, num_nodes, num_nodes, 3, num_nodes)
    case = replace(case, max_kept=6)
    uniform = case.uniform_trees()
    results = verify_uniform(trees, case, uniform, case.targets.view(uniform[0].shape))
    check_uniform(case, results, list(range(len(case.tokens))))
    ragged = trees.verify_ragged_trees(*case.ragged())
    assert torch.equal(results[2].long(), ragged.num_confirmed)
    path = torch.where(results[1] >= 0, results[1] - case.starts[:-1, None], -1)
    assert torch.equal(path, ragged.path.long())


def test_rows_of_nodes_may_lie_anywhere(trees: Ops) -> None:
    case = random_trees(12, 9, seed=3, size=2, num_nodes=9)
    tokens, _, first_child, next_sibling = case.uniform_trees()
    rows = torch.randperm(108, generator=torch.Generator().manual_seed(1))
    targets = torch.empty(108, dtype=torch.int64)
    targets[rows] = case.targets
    arranged = (tokens, rows.view(12, 9), first_child, next_sibling)
    check_uniform(case, verify_uniform(trees, case, arranged, targets.view(12, 9)), rows.tolist())


def test_rows_outside_of_their_range_are_never_accepted(trees: Ops) -> None:
    chain = replace(
        random_trees(4, 3, seed=1, size=1, num_nodes=3),  # all tokens and targets are 0
        first_child=torch.tensor([1, 2, -1] * 4, dtype=torch.int32),
        next_sibling=torch.full((12,), -1, dtype=torch.int32),
    )
    tokens, rows, first_child, next_sibling = chain.uniform_trees()
    rows[0, 0], rows[1, 1], rows[2, 2] = -1, 12, 2**40
    results = verify_uniform(
        trees, chain, (tokens, rows, first_child, next_sibling), torch.zeros(4, 3).long()
    )
    assert results[1].tolist() == [[-1, -1, -1], [3, -1, -1], [6, 7, -1], [9, 10, 11]]
    assert results[2].tolist() == [0, 0, 1, 2]
    assert results[0].tolist() == [-7, -7, -7, 0, -7, -7, 0, 0, -7, 0, 0, 0]


@pytest.mark.parametrize("seed", range(10))
def test_links_to_no_later_node_end_the_walk(trees: Ops, seed: int) -> None:
    case = random_trees(30, 7, seed, size=2)
    generator = torch.Generator().manual_seed(seed)
    for links in (case.first_child, case.next_sibling):
        is_broken = torch.rand(len(links), generator=generator) < 0.3
        wild = torch.tensor([0, 1, 2, 3, 6, 7, 8, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        chosen = wild[torch.randint(0, len(wild), links.shape, generator=generator)]
        links[is_broken] = chosen[is_broken]
    check_ragged(case, trees.verify_ragged_trees(*case.ragged()))


def test_starts_outside_of_the_tokens_are_cut_off(trees: Ops) -> None:
    case = random_trees(6, 8, seed=2, size=2)
    total = len(case.tokens)
    starts = torch.tensor([-3, 0, 2**40, 5, total - 2, 2**62, 2**62 + 1])
    case = replace(case, starts=starts)
    check_ragged(case, trees.verify_ragged_trees(*case.ragged()))


def test_no_tokens_and_no_requests(trees: Ops) -> None:
    case = random_trees(3, 4, seed=0)
    ints, longs = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    zeros = torch.zeros(4, dtype=torch.int64)
    result = trees.verify_ragged_trees(longs, longs, ints, ints, zeros, 2)
    assert result.path.tolist() == [[-1, -1]] * 3
    assert result.next_token.tolist() == result.num_confirmed.tolist() == [0, 0, 0]
    result = sgl_kernel.verify_ragged_trees(
        case.tokens, case.targets, case.first_child, case.next_sibling, zeros[:1], 2
    )
    assert [part.shape for part in result] == [(0,), (0, 2), (0,)]


@pytest.mark.parametrize("seed", range(6))
def test_built_trees_are_confirmed_as_by_their_parents(trees: Ops, seed: int) -> None:
    """Feeds both verifications with what build_ragged_trees writes."""
    drafts = drafted(20, 3, 4, seed)
    built = trees.build_ragged_trees(*drafts.flat(), drafts.num_rows)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, built.tokens.shape, generator=generator)
    tokens = built.tokens % 3
    links = (built.first_child, built.next_sibling)
    by_links = trees.verify_ragged_trees(tokens, targets, *links, built.starts, 64)
    by_parents = sgl_kernel.confirm_drafts(
        tokens, targets, built.parents, built.starts, built.starts.diff(), 64
    )
    assert all(torch.equal(*pair) for pair in zip(by_links, by_parents, strict=True))
    assert by_links.num_confirmed.max() > 1


def test_arguments_are_refused_with_a_remedy() -> None:
    case = random_trees(4, 5, seed=1, num_nodes=5)
    for broken, remedy in [
        (replace(case, tokens=case.tokens.int()), "tokens .*convert"),
        (replace(case, tokens=case.tokens[None]), "flatten"),
        (replace(case, targets=case.targets[1:]), "targets must be"),
        (replace(case, first_child=case.first_child.long()), "first_child .*convert"),
        (replace(case, next_sibling=case.next_sibling[1:]), "next_sibling must be"),
        (replace(case, starts=case.starts.int()), "starts .*convert"),
        (replace(case, starts=case.starts[:0]), "starts must be"),
        (replace(case, max_kept=0), "max_kept"),
        (replace(case, max_kept=1025), "max_kept"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.verify_ragged_trees(*broken.ragged())
    trees = case.uniform_trees()
    good = (*(torch.zeros(size, dtype=torch.int32) for size in (20, (4, 3), 4)), *trees)
    targets = case.targets.view(4, 5)
    for place, value, remedy in [
        (0, good[0].long(), "predicts .*convert"),
        (1, good[1][:, :0], "at least one column"),
        (1, good[1][1:], "accept_index must be"),
        (2, good[2][1:], "accept_token_num must be"),
        (3, trees[0].t(), "must be"),
        (3, trees[0].int(), "candidates .*convert"),
        (4, trees[1][1:], "retrive_index must be"),
        (5, trees[2].t().contiguous().t(), "retrive_next_token must be contiguous"),
        (6, trees[3].int(), "retrive_next_sibling .*convert"),
    ]:
        arguments = list(good)
        arguments[place] = value
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.verify_tree_greedy(*arguments, targets)
    with pytest.raises(ValueError, match="target_predict must be"):
        sgl_kernel.verify_tree_greedy(*good, targets[1:])
