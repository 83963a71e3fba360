"""Verification of drafts: the torch reference, and the kernel's own code on emulated
threads, against one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import emulated_library
import pytest
import torch
from speculation_oracle import (
    DraftCase,
    assert_confirmed,
    chain_as_tree,
    pending_count,
    random_drafts,
)

import sgl_kernel
from sgl_kernel import ConfirmedDrafts

Confirm = Callable[[DraftCase], ConfirmedDrafts]


@pytest.fixture(params=["reference", "emulated"])
def confirm(request: pytest.FixtureRequest) -> Confirm:
    if request.param == "reference":
        return lambda case: sgl_kernel.confirm_drafts(*case.arguments())
    library = request.getfixturevalue("library")
    return lambda case: emulated_library.confirm_drafts(library, case)


def one_request(tokens: list[int], targets: list[int], parents: list[int] | None) -> DraftCase:
    return DraftCase(
        tokens=torch.tensor(tokens),
        targets=torch.tensor(targets),
        parents=None if parents is None else torch.tensor(parents, dtype=torch.int32),
        starts=torch.tensor([0, len(tokens)]),
        num_rows=torch.tensor([len(tokens)]),
        max_rows=len(tokens),
    )


@pytest.mark.long_matrix
@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 31, 32, 33, 64, 65, 200])
def test_ragged_drafts(confirm: Confirm, max_rows: int, has_tree: bool, reads_all: bool) -> None:
    case = random_drafts(30, max_rows, max_rows, has_tree, reads_all)
    assert_confirmed(case, confirm(case))


def test_random_trees_of_many_shapes(confirm: Confirm) -> None:
    lengths = set()
    for seed in range(200):
        case = random_drafts(6, 1 + seed % 12, seed, reads_all=seed % 2 == 0)
        result = confirm(case)
        assert_confirmed(case, result)
        lengths |= set(result.num_confirmed.tolist())
    assert lengths >= set(range(7)), "the cases confirm too little to tell much"


@pytest.mark.parametrize("num_requests", [1, 2, 1024])
def test_any_number_of_requests(confirm: Confirm, num_requests: int) -> None:
    case = random_drafts(num_requests, 4, seed=num_requests)
    assert_confirmed(case, confirm(case))


def test_a_step_of_prompts_and_requests_that_take_no_part(confirm: Confirm) -> None:
    case = replace(
        random_drafts(6, 5, seed=1, reads_all=False),
        num_rows=torch.tensor([0, 1, 0, 1, 1, 0]),
    )
    result = confirm(case)
    assert_confirmed(case, result)
    assert result.num_confirmed.tolist() == [0] * 6
    assert result.path[:, 0].tolist() == [-1, 0, -1, 0, 0, -1]
    assert result.next_token[[0, 2, 5]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("num_matching", [0, 1, 30, 31, 32, 63, 64, 1022, 1023])
def test_long_chains_are_confirmed_up_to_the_first_mismatch(
    confirm: Confirm, num_matching: int
) -> None:
    targets = list(range(1, 1025))
    tokens = [0, *targets[:-1]]
    tokens[num_matching + 1 : num_matching + 2] = [-1] * (num_matching < 1023)
    result = confirm(one_request(tokens, targets, None))
    assert result.num_confirmed.tolist() == [num_matching]
    assert result.next_token.tolist() == [num_matching + 1]
    assert result.path[0, : num_matching + 1].tolist() == list(range(num_matching + 1))
    assert (result.path[0, num_matching + 1 :] == -1).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_chain_is_the_tree_whose_rows_follow_the_one_before(confirm: Confirm, seed: int) -> None:
    case = random_drafts(40, 12, seed, has_tree=False, reads_all=seed % 2 == 0)
    chain, tree = confirm(case), confirm(chain_as_tree(case))
    assert all(torch.equal(*pair) for pair in zip(chain, tree, strict=True))


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(20))
def test_where_siblings_differ_all_rows_whose_whole_path_matches_are_kept(
    confirm: Confirm, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, num_children, tokens, parents = 64, [0] * 64, [99], [-1]
    for row in range(1, size):
        parent = int(torch.randint(max(0, row - 5), row, (1,), generator=generator))
        tokens.append(num_children[parent])
        num_children[parent] += 1
        parents.append(parent)
    targets = [int(torch.randint(max(n, 1), (1,), generator=generator)) for n in num_children]
    is_kept = [True] + [False] * (size - 1)
    for row in range(1, size):
        is_kept[row] = is_kept[parents[row]] and tokens[row] == targets[parents[row]]
    result = confirm(one_request(tokens, targets, parents))
    kept = [row for row in range(size) if is_kept[row]]
    assert result.path[0, : len(kept)].tolist() == kept
    assert result.num_confirmed.tolist() == [len(kept) - 1]


def test_of_siblings_with_the_same_token_the_lowest_row_is_kept(confirm: Confirm) -> None:
    tokens, targets = [9, 7, 7, 8, 8, 5], [7, 1, 8, 5, 0, 0]
    result = confirm(one_request(tokens, targets, [-1, 0, 0, 2, 2, 3]))
    assert result.path.tolist() == [[0, 1, -1, -1, -1, -1]]
    assert result.next_token.tolist() == [1]
    # Row 1, the lowest of 64 rows in both halves of the warp's two rounds.
    tokens = [9, *[7] * 63]
    assert confirm(one_request(tokens, [7, *[1] * 63], [-1, *[0] * 63])).path[0, 1] == 1


@pytest.mark.parametrize("parent", [-1, 2, 3, 4, 1000, -(2**31), 2**31 - 1])
def test_a_row_whose_parent_is_no_row_before_it_is_never_confirmed(
    confirm: Confirm, parent: int
) -> None:
    result = confirm(one_request([7] * 4, [7] * 4, [parent, 0, parent, parent]))
    assert result.path.tolist() == [[0, 1, -1, -1]]


@pytest.mark.parametrize("seed", range(6))
def test_numbers_outside_of_their_range_are_cut_off(confirm: Confirm, seed: int) -> None:
    case = random_drafts(12, 6, seed, reads_all=seed % 2 == 0)
    wild = torch.tensor([2**62, 2**31, 9, -1, -(2**62), 7, 6, 5, 2**33, 100, 8, 2**62])
    starts = case.starts.clone()
    starts[0] = -5
    starts[10:] += 50
    for broken in (
        replace(case, num_rows=wild),
        replace(case, num_rows=wild, starts=starts),
        replace(case, num_rows=wild, max_rows=3),
    ):
        assert_confirmed(broken, confirm(broken))


def test_targets_outside_of_their_range_are_cut_off(confirm: Confirm) -> None:
    case = random_drafts(12, 6, seed=7, reads_all=False)
    assert case.target_starts is not None
    assert case.parents is not None
    places = case.target_starts.clone()
    places[1], places[3], places[5] = -1, len(case.targets) - 2, 2**40
    many = torch.full((12,), 9)
    broken = replace(case, num_rows=many, target_starts=places)
    assert [pending_count(broken, request) for request in (1, 3, 5)] == [0, 2, 0]
    assert_confirmed(broken, confirm(broken))
    # Fewer tokens than the starts say.
    broken = replace(case, tokens=case.tokens[:9], parents=case.parents[:9], num_rows=many)
    assert_confirmed(broken, confirm(broken))


def test_nothing_behind_the_tokens_and_the_targets_is_read(confirm: Confirm) -> None:
    memory = torch.arange(20)
    case = DraftCase(
        tokens=memory[:8],
        targets=memory[1:9],
        parents=None,
        starts=torch.tensor([0, 12]),
        num_rows=torch.tensor([12]),
        max_rows=12,
        target_starts=torch.tensor([0]),
    )
    assert confirm(case).num_confirmed.tolist() == [7]
    fewer_targets = confirm(replace(case, targets=memory[1:4]))
    assert fewer_targets.num_confirmed.tolist() == [2]
    assert fewer_targets.next_token.tolist() == [3]


def test_no_requests_give_no_results() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    result = sgl_kernel.confirm_drafts(empty, empty, None, torch.zeros(1).long(), empty, 4)
    assert [part.shape for part in result] == [(0,), (0, 4), (0,)]


def test_steps_without_rows(confirm: Confirm) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    zeros = torch.zeros(3, dtype=torch.int64)
    case = DraftCase(empty, empty, None, torch.zeros(4, dtype=torch.int64), zeros + 1, 2)
    assert_confirmed(case, confirm(case))
    some = torch.zeros(5, dtype=torch.int64)
    case = replace(case, tokens=some, starts=torch.tensor([0, 2, 4, 5]), target_starts=zeros)
    assert_confirmed(case, confirm(case))


def test_draft_arguments_are_refused_with_a_remedy() -> None:
    case = random_drafts(4, 5, seed=2, reads_all=False)
    assert case.parents is not None
    assert case.target_starts is not None
    for broken, remedy in [
        (replace(case, tokens=case.tokens.int()), "tokens .*convert"),
        (replace(case, tokens=case.tokens[None]), "flatten"),
        (replace(case, tokens=case.tokens.to("meta")), "tokens .*move"),
        (replace(case, targets=case.targets.int()), "targets .*convert"),
        (replace(case, target_starts=None), "targets must be"),
        (replace(case, parents=case.parents.long()), "parents .*convert"),
        (replace(case, parents=case.parents[1:]), "parents must be"),
        (replace(case, starts=case.starts[1:]), r"starts must be \[5\]"),
        (replace(case, num_rows=case.num_rows.int()), "num_rows .*convert"),
        (replace(case, target_starts=case.target_starts[1:]), "target_starts must be"),
        (replace(case, max_rows=0), "max_rows"),
        (replace(case, max_rows=1025), "draft fewer"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.confirm_drafts(*broken.arguments())
