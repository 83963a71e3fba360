"""Building draft trees: the torch reference and the kernels on emulated threads, against loops."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from emulated_trees import EmulatedTrees
from tree_oracle import Drafted, assert_ragged, drafted, nodes_of, uniform_parents

import sgl_kernel
from sgl_kernel import RaggedTrees, TreeMaskMode

Ops = ModuleType | EmulatedTrees
FULL, QUERIES, PACKED = TreeMaskMode


class Built:
    """The results of build_tree_kernel_efficient; they hold poison before."""

    def __init__(self, case: Drafted, num_nodes: int, mode: TreeMaskMode) -> None:
        num_requests = len(case.seq_lens)
        self.case, self.num_nodes, self.mode = case, num_nodes, mode
        lengths = case.seq_lens.clamp(min=0)
        row_bytes = 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4
        sizes = {
            FULL: int((num_nodes * (lengths + num_nodes)).sum()),
            QUERIES: num_requests * num_nodes**2,
            PACKED: num_requests * num_nodes * row_bytes,
        }
        self.mask = torch.full((sizes[mode],), 0xA5, dtype=torch.uint8)
        if mode != PACKED:
            self.mask = torch.ones(sizes[mode], dtype=torch.bool)
        self.positions = torch.full((num_requests * num_nodes,), -7)
        self.links = [torch.full((num_requests, num_nodes), -7) for _ in range(3)]

    def run(self, ops: Ops, selected: torch.Tensor) -> Built:
        case = self.case
        ops.build_tree_kernel_efficient(
            *(case.parent_list, selected, case.seq_lens, self.mask, self.positions, *self.links),
            *(case.topk, case.depth, self.num_nodes, self.mode),
        )
        return self

    def masks(self) -> list[list[set[int]]]:
        """Returns what each node of each request sees; the prefix of FULL_MASK is all seen."""
        masks, start, size = [], 0, self.num_nodes
        for length in self.case.seq_lens.tolist():
            if self.mode == PACKED:
                row_bytes = len(self.mask) // (size * len(self.case.seq_lens))
                rows = self.mask[start : start + size * row_bytes].view(size, row_bytes).tolist()
                start += size * row_bytes
                numbers = [int.from_bytes(bytes(row), "little") for row in rows]
                masks.append([{j for j in range(32) if number >> j & 1} for number in numbers])
                continue
            prefix = length if self.mode == FULL else 0
            block = self.mask[start : start + size * (prefix + size)].view(size, prefix + size)
            start += block.numel()
            assert block[:, :prefix].all()
            masks.append([set(row.nonzero()[:, 0].tolist()) for row in block[:, prefix:]])
        return masks

    def check(self, selected: torch.Tensor) -> None:
        """All results are what loops say."""
        case, size = self.case, self.num_nodes
        masks = self.masks()
        for request, ids in enumerate(selected.tolist()):
            parents = uniform_parents(case.parent_list[request].tolist(), ids, case.topk)
            nodes = nodes_of(parents)
            rows = slice(request * size, (request + 1) * size)
            expected = [int(case.seq_lens[request]) + node.depth for node in nodes]
            assert self.positions[rows].tolist() == expected
            assert self.links[0][request].tolist() == list(range(rows.start, rows.stop))
            assert self.links[1][request].tolist() == [node.first_child for node in nodes]
            assert self.links[2][request].tolist() == [node.next_sibling for node in nodes]
            assert masks[request] == [node.seen for node in nodes]


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("topk", "depth", "num_nodes"),
    [(1, 1, 1), (1, 1, 2), (1, 4, 5), (2, 2, 5), (3, 1, 4), (3, 3, 8), (4, 5, 9), (4, 4, 16),
     (4, 4, 17), (8, 3, 32), (10, 6, 60), (10, 7, 64), (10, 7, 65), (6, 8, 200)],
)  # fmt: skip
@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_uniform_trees(
    trees: Ops, topk: int, depth: int, num_nodes: int, mode: TreeMaskMode
) -> None:
    if mode == PACKED and num_nodes > 32:
        num_nodes = 31
    case = drafted(5, topk, depth, seed=num_nodes)
    selected = case.selected(num_nodes)
    Built(case, num_nodes, mode).run(trees, selected).check(selected)


def test_the_largest_uniform_tree(trees: Ops) -> None:
    case = drafted(2, 12, 9, seed=3)
    selected = case.selected(1024)
    Built(case, 1024, QUERIES).run(trees, selected).check(selected)


def test_full_masks_of_many_requests(trees: Ops) -> None:
    case = drafted(70, 3, 3, seed=5)
    selected = case.selected(7)
    Built(case, 7, FULL).run(trees, selected).check(selected)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("seed", range(4))
def test_nodes_without_a_path_to_the_root_stay_alone(
    trees: Ops, mode: TreeMaskMode, seed: int
) -> None:
    case = drafted(6, 4, 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    selected = case.selected(16)
    # Parents that are gone, so that whole branches are; then numbers of no candidate.
    gone = torch.rand(selected.shape, generator=generator) < 0.2
    selected = torch.where(
        gone, torch.randint(0, 52, selected.shape, generator=generator), selected
    )
    selected[1, 3], selected[1, 5], selected[2, 0] = -1, 2**62, -(2**63)
    selected[3] = selected[3].flip(0)
    case.parent_list[4, 3:] = torch.tensor([-1, 2**40, -5, 0, 1, 2, 3, 4, 5, 6])[: 13 - 3]
    built = Built(case, 16, mode).run(trees, selected)
    built.check(selected)
    assert any(node == {0, 9} for node in (masks[9] for masks in built.masks()))


def test_the_last_requests_search_ends_with_its_own_row(trees: Ops) -> None:
    """The parent of request 0's node is the first candidate of request 1: it is not its own."""
    case = replace(drafted(2, 2, 2, seed=0), parent_list=torch.tensor([[-1, 0, 1]] * 2))
    selected = torch.tensor([[4, 5], [1, 4]])
    built = Built(case, 3, QUERIES).run(trees, selected)
    assert built.links[1].tolist() == [[-1, -1, -1], [1, 2, -1]]
    assert built.masks() == [[{0}, {0, 1}, {0, 2}], [{0}, {0, 1}, {0, 1, 2}]]


def test_masks_that_reach_outside_are_not_written(trees: Ops) -> None:
    case = drafted(4, 2, 2, seed=1)
    selected = case.selected(4)
    case = replace(case, seq_lens=torch.tensor([3, 2**62, 2, -9]))
    built = Built(replace(case, seq_lens=torch.tensor([3, 2, 2, 0])), 4, FULL)
    built.case = case
    built.run(trees, selected)
    first = nodes_of(uniform_parents(case.parent_list[0].tolist(), selected[0].tolist(), 2))
    block = built.mask[: 4 * 7].view(4, 7)
    assert [set(row.nonzero()[:, 0].tolist()) for row in block[:, 3:]] == [n.seen for n in first]
    assert block[:, :3].all()
    assert built.mask[28:].all(), "a mask was written whose place nobody knows"


def test_a_negative_length_has_no_prefix(trees: Ops) -> None:
    case = drafted(3, 2, 2, seed=2)
    selected = case.selected(4)
    expected = Built(replace(case, seq_lens=torch.tensor([0, 0, 5])), 4, FULL).run(trees, selected)
    built = Built(replace(case, seq_lens=torch.tensor([-3, 0, 5])), 4, FULL).run(trees, selected)
    assert torch.equal(built.mask, expected.mask)
    assert (built.positions - expected.positions).tolist() == [-3] * 4 + [0] * 8


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("topk", "depth"), [(1, 1), (1, 6), (2, 1), (2, 3), (4, 3), (8, 5), (10, 7)]
)
@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_ragged_trees(trees: Ops, num_requests: int, topk: int, depth: int) -> None:
    case = drafted(num_requests, topk, depth, seed=num_requests + depth)
    case = replace(case, num_rows=case.num_rows + 5)
    assert_ragged(case, trees.build_ragged_trees(*case.flat(), case.num_rows))


@pytest.mark.parametrize("num_nodes", [1, 2, 6, 31, 32, 33, 64])
def test_uniform_and_ragged_trees_are_the_same(trees: Ops, num_nodes: int) -> None:
    case = drafted(9, 8, 4, seed=num_nodes, num_nodes=num_nodes)
    selected = case.selected(num_nodes)
    uniform = Built(case, num_nodes, QUERIES).run(trees, selected)
    ragged = trees.build_ragged_trees(*case.flat(), case.num_rows)
    assert torch.equal(uniform.positions, ragged.positions)
    assert torch.equal(uniform.links[1].flatten(), ragged.first_child.long())
    assert torch.equal(uniform.links[2].flatten(), ragged.next_sibling.long())
    assert torch.equal(uniform.links[0][:, 0], ragged.starts[:-1])
    bits = ragged.ancestors[:, None] >> torch.arange(num_nodes) & 1
    assert torch.equal(uniform.mask.view(-1, num_nodes), bits.bool())


def one_request(scores: list[float], parents: list[int], num_nodes: int) -> Drafted:
    case = drafted(1, 1, 1, seed=0)
    return replace(
        case,
        tokens=torch.arange(10, 10 + len(scores)),
        scores=torch.tensor(scores, dtype=torch.float32),
        parents=torch.tensor(parents, dtype=torch.int32),
        starts=torch.tensor([0, len(scores)]),
        num_nodes=torch.tensor([num_nodes]),
        num_rows=num_nodes,
    )


def build(ops: Ops, case: Drafted) -> RaggedTrees:
    result = ops.build_ragged_trees(*case.flat(), case.num_rows)
    assert_ragged(case, result)
    return result


@pytest.mark.parametrize("score", [1.0, 0.25, 0.0, torch.inf])
def test_of_equal_scores_the_first_are_kept_so_parents_come_before_children(
    trees: Ops, score: float
) -> None:
    parents = [-1, *range(69)]
    result = build(trees, one_request([score] * 70, parents, 40))
    assert result.tokens[1:].tolist() == list(range(10, 49))
    assert result.parents.tolist() == list(range(-1, 39))


def test_scores_that_are_no_probability_count_as_zero(trees: Ops) -> None:
    scores = [torch.nan, -1.0, -torch.inf, 0.5, -0.0, -torch.nan, 1e-45, 0.0]
    assert build(trees, one_request(scores, [-1] * 8, 3)).tokens[1:].tolist() == [13, 16]
    assert build(trees, one_request(scores, [-1] * 8, 6)).tokens[1:].tolist() == [
        10,
        11,
        12,
        13,
        16,
    ]
    assert build(trees, one_request([torch.nan] * 5, [-1, 0, 1, 2, 3], 4)).parents.tolist() == [
        *range(-1, 3)
    ]


def test_scores_that_differ_in_one_bit_are_told_apart(trees: Ops) -> None:
    base = torch.tensor(0.3).view(torch.int32)
    scores = (base + torch.tensor([5, 0, 3, 9, 1, 4, 2], dtype=torch.int32)).view(torch.float32)
    assert build(trees, one_request(scores.tolist(), [-1] * 7, 4)).tokens[1:].tolist() == [
        10,
        13,
        15,
    ]


def test_children_without_their_parent_are_not_linked(trees: Ops) -> None:
    # Candidate 1 scores more than its parent 0, which is left out; 3 follows it.
    result = build(trees, one_request([0.1, 0.9, 0.8, 0.7], [-1, 0, -1, 1], 4))
    assert result.tokens[1:].tolist() == [11, 12, 13]
    assert result.parents.tolist() == [-1, -1, 0, -1]
    assert result.ancestors.tolist() == [1, 3, 5, 9]
    assert result.first_child.tolist() == [2, -1, -1, -1]
    for parent in (0, 1, 5, -2, -(2**31), 2**31 - 1):  # its own number, later ones, none
        result = build(trees, one_request([0.9, 0.8], [parent, -1], 3))
        assert result.parents.tolist() == [-1, -1, 0]


def test_requests_without_drafts_without_rows_and_with_too_many(trees: Ops) -> None:
    case = drafted(7, 8, 2, seed=4)
    wanted = torch.tensor([1, 0, 64, 65, 2**40, -(2**40), 1])
    case = replace(case, num_nodes=wanted, num_rows=200)
    result = build(trees, case)
    assert result.starts.tolist() == [0, 1, 1, 65, 129, 193, 193, 194]
    few = replace(case, starts=torch.tensor([0, 0, 0, 3, 3, 9, 9, 9]), num_rows=40)
    assert build(trees, few).starts.tolist() == [0, 1, 1, 5, 6, 13, 13, 14]


def test_row_63_has_the_sign_bit(trees: Ops) -> None:
    result = build(trees, one_request([0.5] * 63, [-1] * 63, 64))
    assert result.ancestors[63] == 1 - 2**63


@pytest.mark.parametrize("num_rows", [0, 1, 7, 30])
def test_rows_that_do_not_fit_are_left_out(trees: Ops, num_rows: int) -> None:
    case = replace(drafted(6, 4, 3, seed=8), num_rows=num_rows)
    assert int(build(trees, case).starts[-1]) <= num_rows
    exact = drafted(6, 4, 3, seed=8)
    assert int(build(trees, exact).starts[-1]) == exact.num_rows


def test_candidates_outside_of_their_range_are_cut_off(trees: Ops) -> None:
    case = drafted(6, 3, 3, seed=9)
    wild = torch.tensor([-4, 5, 2**40, 9, len(case.tokens) - 2, 2**50, 2**62])
    build(trees, replace(case, starts=wild, num_rows=70))


def test_no_candidates_and_no_requests(trees: Ops) -> None:
    build(trees, replace(one_request([], [], 1), num_rows=3))
    none = torch.empty(0, dtype=torch.int64)
    floats, ints = torch.empty(0), torch.empty(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    result = sgl_kernel.build_ragged_trees(none, floats, ints, zero, none, none, none, 3)
    assert result.starts.tolist() == [0]
    assert result.ancestors.tolist() == [-1] * 3


def test_more_candidates_than_a_warp_reads_at_once(trees: Ops) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(5000, generator=generator).tolist()
    build(trees, one_request(scores, [-1] * 5000, 64))


def test_arguments_of_ragged_trees_are_refused_with_a_remedy() -> None:
    case = drafted(3, 2, 2, seed=1)
    for broken, remedy in [
        (replace(case, tokens=case.tokens.int()), "tokens .*convert"),
        (replace(case, tokens=case.tokens[None]), "flatten"),
        (replace(case, tokens=case.tokens.to("meta")), "tokens .*move"),
        (replace(case, scores=case.scores.double()), "scores .*convert"),
        (replace(case, parents=case.parents.long()), "parents .*convert"),
        (replace(case, starts=case.starts[1:]), r"starts must be \[4\]"),
        (replace(case, num_nodes=case.num_nodes.int()), "num_nodes .*convert"),
        (replace(case, seq_lens=case.seq_lens[1:]), "seq_lens must be"),
        (replace(case, num_rows=-1), "num_rows"),
        (replace(case, num_rows=2**31), "split the call"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.build_ragged_trees(*broken.flat(), broken.num_rows)


def test_arguments_of_uniform_trees_are_refused_with_a_remedy() -> None:
    case = drafted(3, 2, 2, seed=1)
    selected = case.selected(5)

    def refuse(remedy: str, built: Built, **changes: object) -> None:
        values = {
            "parent_list": case.parent_list,
            "selected_index": selected,
            "verified_seq_len": case.seq_lens,
            "tree_mask": built.mask,
            "positions": built.positions,
            "retrive_index": built.links[0],
            "retrive_next_token": built.links[1],
            "retrive_next_sibling": built.links[2],
            "topk": 2,
            "depth": 2,
            "draft_token_num": 5,
            "tree_mask_mode": built.mode,
        }
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.build_tree_kernel_efficient(**{**values, **changes})

    built = Built(case, 5, QUERIES)
    refuse("parent_list must be", built, parent_list=case.parent_list[:, :2])
    refuse("parent_list .*convert", built, parent_list=case.parent_list.int())
    refuse("selected_index must be", built, draft_token_num=6)
    refuse("draft_token_num must be", built, draft_token_num=1025)
    refuse("draft_token_num must be", built, draft_token_num=0)
    refuse("topk and depth", built, topk=0)
    refuse("tree_mask must be", built, tree_mask=built.mask[1:])
    refuse("tree_mask .*convert", built, tree_mask=built.mask.to(torch.uint8))
    refuse("tree_mask must be contiguous", built, tree_mask=torch.ones(25, 6).bool()[:, :3])
    refuse("tree_mask must be", Built(case, 5, FULL), tree_mask=built.mask[:74])
    refuse("positions must be", built, positions=built.positions[1:])
    refuse("retrive_next_token must be", built, retrive_next_token=built.links[1][1:])
    refuse("3 is not a valid TreeMaskMode", built, tree_mask_mode=3)
    refuse("use QLEN_ONLY", Built(case, 33, PACKED), draft_token_num=33,
           selected_index=torch.zeros(3, 32).long())  # fmt: skip
