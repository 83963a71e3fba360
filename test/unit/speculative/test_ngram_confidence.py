"""Trees of n-grams: how likely their nodes are, the order that follows from it, and what is learnt
of confirmed paths. The oracle is plain Python over branches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from sglang.srt.speculative.ngram_confidence import PRIOR_TRIALS, BranchConfidence, OrderedNodes
from sglang.srt.speculative.ngram_tier import class_of
from sglang.srt.speculative.ngram_worker import branch_lengths
from sglang.srt.step.request_rows import confidence_of_scores

NUM_ROWS, PADDING_ROW = 9, 8
CPU = torch.device("cpu")
Node = tuple[int, int]  # branch, and place in it


def confidence_for(branches: Sequence[int]) -> BranchConfidence:
    return BranchConfidence(NUM_ROWS, branches, PADDING_ROW, CPU)


def nodes_of(branches: Sequence[int]) -> list[Node]:
    return [(branch, place) for branch, size in enumerate(branches) for place in range(size)]


def score_of(trials: torch.Tensor, lens: Sequence[int], node: Node) -> float:
    """Of the path to a node, by chances [2, NUM_CLASSES, L]."""
    branch, last = node
    chances = trials[min(branch, 1), class_of(lens[branch])]
    return float(chances[: last + 1].double().prod())


def random_lens(luck: random.Random, num_branches: int) -> list[int]:
    """Of the places found, descending; some branches have none."""
    found = sorted((luck.choice([1, 2, 3, 6, 12]) for _ in range(num_branches)), reverse=True)
    num_found = luck.randint(0, num_branches)
    return [*found[:num_found], *[0] * (num_branches - num_found)]


SHAPES = [(1, 4), (4, 9), (7, 3), (11, 10), (63, 6)]


@pytest.mark.parametrize(("num_drafts", "breadth"), SHAPES)
def test_any_first_nodes_are_the_likeliest_tree(num_drafts: int, breadth: int) -> None:
    """Whatever was learnt: scores are products along branches, none is above the one before it,
    each node is behind the one that it follows, and nodes without a place are behind all others."""
    luck, branches = random.Random(num_drafts), branch_lengths(num_drafts, breadth)
    confidence, nodes = confidence_for(branches), nodes_of(branches)
    trials = confidence.trials
    for _ in range(20):
        tried = torch.randint(0, 300, trials.tried.shape).float()
        trials.tried.copy_(tried)
        trials.right.copy_((tried * torch.rand(tried.shape)).floor())
        chances = trials.chances()
        rows = torch.tensor(luck.sample(range(NUM_ROWS), 5))
        lens = [random_lens(luck, len(branches)) for _ in rows]
        found = confidence.order(rows, torch.tensor(lens))
        for index, match_lens in enumerate(lens):
            check_order(found, index, match_lens, nodes, chances)


def check_order(
    found: OrderedNodes, index: int, lens: Sequence[int], nodes: list[Node], chances: torch.Tensor
) -> None:
    order, scores = found.order[index].tolist(), found.scores[index].tolist()
    assert sorted(order) == list(range(len(nodes)))
    count = sum(branch == 0 or lens[branch] > 0 for branch, _ in nodes)
    assert int(found.counts[index]) == count
    assert scores == sorted(scores, reverse=True)
    numbers = {nodes[place]: 1 + rank for rank, place in enumerate(order)}
    for rank, (place, parent) in enumerate(zip(order, found.parents[index].tolist(), strict=True)):
        branch, depth = nodes[place]
        assert parent == (numbers[branch, depth - 1] if depth else 0)
        assert parent <= rank, "A node stands before the one that it follows."
        exists = rank < count
        assert exists == (branch == 0 or lens[branch] > 0)
        right = score_of(chances, lens, (branch, depth)) if exists else 0.0
        assert scores[rank] == pytest.approx(right, rel=1e-4, abs=1e-30)


def test_products_of_confidences_are_scores() -> None:
    confidence = confidence_for((3, 2))
    scores = confidence.order(torch.tensor([0, 1]), torch.tensor([[3, 1], [0, 0]])).scores
    torch.testing.assert_close(confidence_of_scores(scores).cumprod(1), scores)
    assert scores[1].tolist() == pytest.approx([0.7, 0.7**2, 0.7**3, 0.0, 0.0])


def test_equal_nodes_keep_the_order_of_branches() -> None:
    confidence = confidence_for((3, 2, 1))
    confidence.trials.tried.fill_(100)
    confidence.trials.right.fill_(100 + PRIOR_TRIALS)
    confidence.trials.right -= confidence.trials._prior_right  # all chances are 1
    found = confidence.order(torch.tensor([2]), torch.tensor([[5, 2, 2]]))
    assert found.order.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert found.parents.tolist() == [[0, 1, 2, 0, 4, 0]]


@pytest.mark.parametrize(("num_drafts", "breadth"), SHAPES)
def test_what_is_learnt_is_what_paths_say(num_drafts: int, breadth: int) -> None:
    """Of trees that are fed in part: a node was tried if it was fed and the one before it in its
    branch was right. Requests without drafts and padding teach nothing."""
    luck, branches = random.Random(num_drafts), branch_lengths(num_drafts, breadth)
    confidence, nodes = confidence_for(branches), nodes_of(branches)
    tried, right = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for _ in range(40):
        rows = [*luck.sample(range(PADDING_ROW), 4), PADDING_ROW, PADDING_ROW]
        lens = [random_lens(luck, len(branches)) for _ in rows]
        lens[-1] = lens[-2]
        found = confidence.order(torch.tensor(rows), torch.tensor(lens))
        fed = [luck.randint(0, int(count)) for count in found.counts]
        paths = list[list[int]]()
        for index, row in enumerate(rows):
            order = [nodes[place] for place in found.order[index].tolist()][: fed[index]]
            branch, length = luck.randrange(len(branches)), luck.randint(0, num_drafts)
            path = [node for node in order if node[0] == branch][:length]
            paths.append([0, *(1 + order.index(node) for node in path)])
            if row == PADDING_ROW:
                continue
            for own_branch, place in order:
                cell = min(own_branch, 1), class_of(lens[index][own_branch]), place
                was_tried = place == 0 or (own_branch, place - 1) in path
                tried[cell] += was_tried
                right[cell] += (own_branch, place) in path
        width = max(map(len, paths))
        padded = [path + [-1] * (width - len(path)) for path in paths]
        num_right = torch.tensor([len(path) - 1 for path in paths])
        told = torch.tensor(padded, dtype=torch.int32)
        confidence.learn(torch.tensor(rows), torch.tensor(fed), num_right, told)
    for each, counts in ((tried, confidence.trials.tried), (right, confidence.trials.right)):
        kept = {cell: count for cell, count in each.items() if count}
        assert kept
        found_counts = {tuple(cell.tolist()): int(counts[tuple(cell)]) for cell in counts.nonzero()}
        assert found_counts == kept


def test_steps_that_emit_nothing_teach_nothing() -> None:
    confidence = confidence_for((3, 2))
    rows = torch.tensor([0, 1])
    confidence.order(rows, torch.tensor([[3, 1], [3, 1]]))
    nothing = torch.zeros(2, dtype=torch.int64)
    confidence.learn(rows, nothing, nothing - 1, torch.full((2, 3), -1, dtype=torch.int32))
    assert not confidence.trials.tried.any()


def test_chances_become_those_of_the_text() -> None:
    """And what was learnt of other text is forgotten. A later branch is as likely as it was."""
    confidence, luck = confidence_for((3, 1)), random.Random(5)
    rows, lens = torch.arange(8), torch.tensor([[12, 1]] * 8)
    for first, second in ((0.9, 0.05), (0.2, 0.6)):
        for _ in range(600):
            order = confidence.order(rows, lens).order[0].tolist()
            paths = []
            for _ in rows:
                lot, path = luck.random(), [0]
                if lot < first:
                    path.append(1 + order.index(0))
                    if luck.random() < 0.5:
                        path.append(1 + order.index(1))
                elif lot < first + second:
                    path.append(1 + order.index(3))
                paths.append(path + [0] * (3 - len(path)) + [len(path) - 1])
            told = torch.tensor(paths)
            confidence.learn(rows, torch.full((8,), 4), told[:, 3], told[:, :3])
        chances = confidence.trials.chances()
        learnt = [chances[0, 5, 0], chances[0, 5, 1], chances[0, 5, 2], chances[1, 1, 0]]
        assert learnt == pytest.approx([first, 0.5, 0.0, second], abs=0.08)
    assert confidence.order(rows, lens).order[0].tolist()[0] == 3, "The second branch is likelier."


def test_before_anything_is_known_the_first_branch_is_the_likeliest() -> None:
    branches = branch_lengths(11, 4)
    confidence = confidence_for(branches)
    found = confidence.order(torch.tensor([0]), torch.tensor([[4] * len(branches)]))
    assert found.order[0, :3].tolist() == [0, 1, 2]
