"""Sampling along draft trees: the torch reference and the kernel on emulated threads."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from emulated_trees import EmulatedTrees
from tree_oracle import nodes_of
from verification_oracle import VerifyCase, assert_last_token, random_trees, sampled_path

import sgl_kernel
from sgl_kernel import ConfirmedDrafts

Ops = ModuleType | EmulatedTrees


def check_ragged(case: VerifyCase, result: ConfirmedDrafts, *thresholds: float) -> None:
    assert [part.dtype for part in result] == [torch.int64, torch.int32, torch.int64]
    for request in range(len(case.starts) - 1):
        path, refused = sampled_path(case, request, *thresholds)
        assert result.path[request].tolist() == path + [-1] * (case.max_kept - len(path))
        assert result.num_confirmed[request] == max(len(path) - 1, 0)
        token = int(result.next_token[request])
        if path:
            assert_last_token(case, request, token, path, refused)
        else:
            assert token == 0


def sample_uniform(
    ops: Ops, case: VerifyCase, draft_probs: torch.Tensor | None, **thresholds: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    trees = case.uniform_trees()
    num_requests, num_nodes = trees[0].shape
    results = (
        torch.full((num_requests * num_nodes,), -7, dtype=torch.int32),
        torch.full((num_requests, case.max_kept), -7, dtype=torch.int32),
        torch.full((num_requests,), -7, dtype=torch.int32),
    )
    ops.tree_speculative_sampling_target_only(
        *(*results, *trees, case.coins.view(num_requests, num_nodes), case.final_coins),
        *(case.probs.view(num_requests, num_nodes, -1), draft_probs),
        **thresholds,
    )
    return results


@pytest.mark.long_matrix
@pytest.mark.parametrize("max_nodes", [1, 2, 5, 33, 64])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.4), (0.0, 0.0)])
def test_ragged_trees(trees: Ops, max_nodes: int, thresholds: tuple[float, float]) -> None:
    case = random_trees(20, max_nodes, seed=max_nodes)
    result = trees.sample_ragged_trees(
        *case.ragged_sampling(),
        threshold_single=thresholds[0],
        threshold_acc=max(thresholds[1], 1e-9),
    )
    check_ragged(case, result, thresholds[0], max(thresholds[1], 1e-9))


@pytest.mark.parametrize("size", [1, 3, 127, 128, 509, 512, 513, 2049, 16385, 40003])
def test_vocabularies_of_any_size(trees: Ops, size: int) -> None:
    """Rows of odd sizes are not aligned, and drawn tokens lie in the whole of them."""
    case = random_trees(4, 5, seed=size, size=size, num_nodes=5)
    for place in (0.0, 0.4, 0.7, 1 - 2**-24):
        case = replace(case, final_coins=torch.full((4,), place))
        check_ragged(case, trees.sample_ragged_trees(*case.ragged_sampling()))


@pytest.mark.parametrize("size", [5, 2051, 70001])
def test_a_request_alone(trees: Ops, size: int) -> None:
    case = random_trees(1, 6, seed=size, size=size, num_nodes=6)
    check_ragged(case, trees.sample_ragged_trees(*case.ragged_sampling()))


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 40])
def test_uniform_trees_are_the_ragged_ones_and_note_what_they_refuse(
    trees: Ops, num_nodes: int
) -> None:
    case = replace(random_trees(24, num_nodes, num_nodes, 6, num_nodes), max_kept=5)
    scratch = torch.zeros(24, num_nodes, 6)
    results = sample_uniform(trees, case, scratch)
    ragged = trees.sample_ragged_trees(*case.ragged_sampling())
    check_ragged(case, ragged)
    assert torch.equal(results[2].long(), ragged.num_confirmed)
    path = torch.where(results[1] >= 0, results[1] - case.starts[:-1, None], -1)
    assert torch.equal(path, ragged.path.long())
    last = results[1].gather(1, results[2].long()[:, None])[:, 0]
    assert torch.equal(results[0][last].long(), ragged.next_token)
    for request in range(24):
        kept, refused = sampled_path(case, request)
        row = scratch[request, kept[-1]]
        assert {token: float(row[token]) for token in row.nonzero()[:, 0].tolist()} == refused
        rows = [int(case.starts[request]) + node for node in kept]
        behind = [int(case.tokens[row]) for row in rows[1:]]
        assert results[0][rows[:-1]].tolist() == behind
    without = sample_uniform(trees, case, None)
    assert all(torch.equal(*pair) for pair in zip(results, without, strict=True))


def star(children: list[int], probs: list[float], coin: float, final_coin: float) -> VerifyCase:
    """A root with a child for each token; nodes have the root's distribution."""
    nodes = nodes_of([-1] + [0] * len(children))
    count = len(nodes)
    return VerifyCase(
        tokens=torch.tensor([99, *children]),
        targets=torch.zeros(count, dtype=torch.int64),
        parents=torch.tensor([node.parent for node in nodes], dtype=torch.int32),
        first_child=torch.tensor([node.first_child for node in nodes], dtype=torch.int32),
        next_sibling=torch.tensor([node.next_sibling for node in nodes], dtype=torch.int32),
        starts=torch.tensor([0, count]),
        max_kept=3,
        coins=torch.full((count,), coin),
        final_coins=torch.tensor([final_coin]),
        probs=torch.tensor([probs] * count),
    )


def sample_star(ops: Ops, case: VerifyCase) -> tuple[list[int], int]:
    result = ops.sample_ragged_trees(*case.ragged_sampling())
    check_ragged(case, result)
    return [node for node in result.path[0].tolist() if node >= 0], int(result.next_token[0])


def test_a_coin_of_zero_takes_no_token_without_probability(trees: Ops) -> None:
    assert sample_star(trees, star([0, 2, 1], [0.0, 0.5, 0.0, 0.5], 0.0, 0.0)) == ([0, 3], 1)
    assert sample_star(trees, star([0, 2], [0.0, 0.5, 0.0, 0.5], 0.0, 0.0)) == ([0], 1)


def test_an_interval_ends_before_its_upper_bound(trees: Ops) -> None:
    probs = [0.25, 0.25, 0.5]
    assert sample_star(trees, star([0, 1], probs, 0.25 - 2**-20, 0.0))[0] == [0, 1]
    assert sample_star(trees, star([0, 1], probs, 0.25, 0.0))[0] == [0, 2]
    assert sample_star(trees, star([0, 1], probs, 0.5, 0.0)) == ([0], 2)


def test_tokens_that_are_none_are_refused(trees: Ops) -> None:
    children = [-1, 3, 2**40, -(2**63), 2**32 + 1]
    assert sample_star(trees, star(children, [0.5, 0.5, 0.0], 0.0, 0.6)) == ([0], 1)


def test_a_token_that_an_earlier_sibling_held_is_not_taken(trees: Ops) -> None:
    assert sample_star(trees, star([0, 0, 0], [0.4, 0.6], 0.7, 0.0)) == ([0], 1)


def test_more_siblings_than_a_warp_looks_at_once(trees: Ops) -> None:
    probs = [1 / 128] * 128
    for coin, node in [(0.26, 34), (0.77, 99), (0.995, None)]:
        path, token = sample_star(trees, star(list(range(100)), probs, coin, 0.5))
        assert path[1:] == ([] if node is None else [node])
        assert node is not None or token >= 100


def test_where_the_drafts_hold_all_that_is_left_one_of_them_is_drawn(trees: Ops) -> None:
    # Rounding can leave the sum of all children at no more than the coin.
    case = star([0, 1], [0.5, 0.25, 0.0], 0.9, 0.7)
    assert sample_star(trees, case) == ([0], 1)
    case = star([0, 1], [torch.nan, -1.0, 0.0], 0.1, 0.7)
    assert sample_star(trees, case) == ([0], 0)


def test_what_is_no_number_is_never_drawn(trees: Ops) -> None:
    probs = [torch.nan, 0.5, -1.0, 0.5, torch.nan, -torch.inf]
    for final_coin, token in [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-24, 3)]:
        assert sample_star(trees, star([0, 2, 4], probs, 0.0, final_coin)) == ([0], token)
    alone = sample_star(trees, star([], probs, 0.0, 0.75))
    assert alone == ([0], 3)


@pytest.mark.parametrize("seed", range(5))
def test_broken_links_and_starts(trees: Ops, seed: int) -> None:
    case = random_trees(20, 7, seed)
    generator = torch.Generator().manual_seed(seed)
    for links in (case.first_child, case.next_sibling):
        is_broken = torch.rand(len(links), generator=generator) < 0.3
        wild = torch.tensor([0, 1, 2, 3, 6, 7, 8, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        chosen = wild[torch.randint(0, len(wild), links.shape, generator=generator)]
        links[is_broken] = chosen[is_broken]
    case.starts[3], case.starts[9], case.starts[-1] = -4, 2**40, 2**62
    check_ragged(case, trees.sample_ragged_trees(*case.ragged_sampling()))


def test_uniform_ops_of_no_requests_write_nothing() -> None:
    """Their outputs are the first rows, none, of memory that stays as it is."""
    case = random_trees(0, 3, seed=0)
    memory = [torch.full(shape, 7, dtype=torch.int32) for shape in ((6,), (2, 4), (2,))]
    ints = [whole[:0] for whole in memory]
    trees = (torch.empty(0, 3).long(),) * 4
    sgl_kernel.verify_tree_greedy(*ints, *trees, trees[0])
    coins = (torch.empty(0, 3), case.final_coins)
    probs = torch.full((2, 3, 5), 7.0)
    sgl_kernel.tree_speculative_sampling_target_only(
        *(*ints, *trees, *coins, torch.empty(0, 3, 5), probs[:0])
    )
    assert all((whole == 7).all() for whole in (*memory, probs))


def test_no_tokens_and_no_requests(trees: Ops) -> None:
    ints, longs = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    zeros = torch.zeros(4, dtype=torch.int64)
    none, coins, probs = torch.empty(0), torch.rand(3), torch.empty(0, 5)
    result = trees.sample_ragged_trees(longs, ints, ints, zeros, none, coins, probs, 2)
    assert result.path.tolist() == [[-1, -1]] * 3
    assert result.next_token.tolist() == result.num_confirmed.tolist() == [0, 0, 0]
    result = sgl_kernel.sample_ragged_trees(longs, ints, ints, zeros[:1], none, none, probs, 2)
    assert [part.shape for part in result] == [(0,), (0, 2), (0,)]


# 1 in 1000 of a correct sampler's seeds would fail; these do not.
_DRAWS = {"reference": 40000, "emulated": 1000}


def test_tokens_follow_the_models_distribution(trees: Ops, request: pytest.FixtureRequest) -> None:
    """All outcomes of a tree of two levels, a path and the token after it, against the product of
    the model's probabilities."""
    draws = _DRAWS[request.node.callspec.params["trees"]]
    parents, tokens = [-1, 0, 0, 0, 1, 1, 2], [99, 4, 0, 2, 1, 3, 4]
    nodes = nodes_of(parents)
    generator = torch.Generator().manual_seed(11)
    probs = torch.rand(7, 5, generator=generator) + 0.05
    probs[0, 1] = 0.0
    probs /= probs.sum(1, keepdim=True)
    result = trees.sample_ragged_trees(
        torch.tensor(tokens).repeat(draws),
        torch.tensor([node.first_child for node in nodes], dtype=torch.int32).repeat(draws),
        torch.tensor([node.next_sibling for node in nodes], dtype=torch.int32).repeat(draws),
        torch.arange(draws + 1) * 7,
        torch.rand(7 * draws, generator=generator),
        torch.rand(draws, generator=generator),
        probs.repeat(draws, 1),
        3,
    )
    last = result.path.gather(1, result.num_confirmed[:, None])[:, 0]
    counts = torch.bincount(last * 5 + result.next_token, minlength=35).double()
    reach = [1.0]
    for node in range(1, 7):
        reach.append(reach[parents[node]] * float(probs[parents[node], tokens[node]]))
    expected = torch.tensor(reach, dtype=torch.float64)[:, None] * probs.double()
    for node in range(1, 7):  # a node's drafted tokens lead to its children
        expected[parents[node], tokens[node]] = 0.0
    expected = expected.flatten() * draws
    assert counts[expected == 0].sum() == 0
    is_possible = expected > 0
    # 35 outcomes but 6 that lead on and one without probability: 27 degrees of freedom.
    assert int(is_possible.sum()) == 28
    chi_square = ((counts - expected) ** 2)[is_possible] / expected[is_possible]
    assert chi_square.sum() < 55.5


def test_arguments_are_refused_with_a_remedy() -> None:
    case = random_trees(4, 5, seed=1, num_nodes=5)
    for broken, remedy in [
        (replace(case, coins=case.coins[1:]), "coins must be"),
        (replace(case, final_coins=case.final_coins.double()), "final_coins .*convert"),
        (replace(case, probs=case.probs[0]), r"probs must be \[T, V\]"),
        (replace(case, probs=case.probs[1:]), "probs must be"),
        (replace(case, probs=case.probs[:, :0]), "probs must have 1 to"),
        (replace(case, probs=case.probs.t().contiguous().t()), "probs must be contiguous"),
        (replace(case, max_kept=0), "max_kept"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.sample_ragged_trees(*broken.ragged_sampling())
    scratch = torch.zeros(4, 5, 8)
    with pytest.raises(ValueError, match="thresholds must be"):
        sample_uniform(sgl_kernel, case, scratch, threshold_acc=1.5)
    with pytest.raises(ValueError, match="thresholds must be"):
        sample_uniform(sgl_kernel, case, scratch, threshold_single=torch.nan)
    with pytest.raises(ValueError, match="draft_probs must be"):
        sample_uniform(sgl_kernel, case, scratch[1:])
    with pytest.raises(ValueError, match="draft_probs must be contiguous"):
        sample_uniform(sgl_kernel, case, torch.zeros(5, 4, 8).transpose(0, 1))
