"""Trees of n-grams: how likely their nodes are, and the order that follows from it. The oracle is
plain Python over branches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from sglang.srt.speculative.ngram_confidence import OrderedNodes, likeliest_nodes
from sglang.srt.step.request_rows import confidence_of_scores

Node = tuple[int, int]  # branch, and place in it


def score_of(lens: Sequence[int], node: Node) -> float:
    """Returns the score of a node: no branch before its own begins right, and it and all that it
    follows are."""
    chances = [(length or 0.1) / ((length or 0.1) + 4) for length in lens]
    branch, place = node
    return math.prod(1 - each for each in chances[:branch]) * chances[branch] ** (1 + place)


def random_lens(luck: random.Random, num_branches: int) -> list[int]:
    """Draws the lengths of the places found, descending; some branches have none."""
    found = sorted((luck.choice([1, 2, 3, 6, 12]) for _ in range(num_branches)), reverse=True)
    num_found = luck.randint(0, num_branches)
    return [*found[:num_found], *[0] * (num_branches - num_found)]


SHAPES = [(1, 1), (4, 4), (7, 3), (11, 10), (63, 6)]  # nodes and branches


@pytest.mark.long_matrix
@pytest.mark.parametrize("corpus_budget", [None, 1, 4])
@pytest.mark.parametrize(("num_drafts", "breadth"), SHAPES)
def test_any_first_nodes_are_the_likeliest_tree(
    num_drafts: int, breadth: int, corpus_budget: int | None
) -> None:
    """However many branches there are. The oracle takes one node after the other, each the
    likeliest one behind those that it has, and of the corpus as many as may be."""
    luck = random.Random(num_drafts)
    for _ in range(20):
        lens = [random_lens(luck, breadth) for _ in range(5)]
        in_corpus = [[luck.randint(0, 1) * (each > 0) for each in of_row] for of_row in lens]
        places = torch.tensor(lens), torch.tensor(in_corpus)
        found = likeliest_nodes(*places, num_drafts, corpus_budget)
        torch.testing.assert_close(confidence_of_scores(found.scores).cumprod(1), found.scores)
        for index, (match_lens, corpus) in enumerate(zip(lens, in_corpus, strict=True)):
            scores = likeliest(match_lens, corpus, num_drafts, corpus_budget)
            check_order(found, index, num_drafts)
            count = int(found.counts[index])
            assert count == len(scores)
            nodes = [divmod(place, num_drafts) for place in found.order[index, :count].tolist()]
            assert all(branch == 0 or match_lens[branch] > 0 for branch, _ in nodes)
            num_given = sum(corpus[branch] for branch, _ in nodes)
            assert corpus_budget is None or num_given <= corpus_budget
            own = [score_of(match_lens, node) for node in nodes]
            told = found.scores[index].tolist()
            assert told[:count] == pytest.approx(own, rel=1e-4, abs=1e-30)
            assert told[:count] == pytest.approx(scores, rel=1e-4, abs=1e-30)
            assert not any(told[count:])


def likeliest(
    lens: Sequence[int],
    in_corpus: Sequence[int],
    num_drafts: int,
    corpus_budget: int | None,
) -> list[float]:
    """Scores of the nodes of a tree, one behind the other."""
    left = num_drafts * len(lens) if corpus_budget is None else corpus_budget
    lengths = [0 if branch and not size else num_drafts for branch, size in enumerate(lens)]
    taken, scores = [0] * len(lens), list[float]()
    while len(scores) < num_drafts:
        offered = [
            (score_of(lens, (branch, taken[branch])), -branch)
            for branch, length in enumerate(lengths)
            if taken[branch] < length and (left or not in_corpus[branch])
        ]
        if not offered:
            break
        score, branch = max(offered)
        taken[-branch] += 1
        left -= in_corpus[-branch]
        scores.append(score)
    return scores


def check_order(found: OrderedNodes, index: int, num_drafts: int) -> None:
    """Each node is behind the one that it follows, also those that are not there."""
    order, scores = found.order[index].tolist(), found.scores[index].tolist()
    assert len(set(order)) == len(order) == num_drafts
    assert scores == sorted(scores, reverse=True)
    nodes = [divmod(place, num_drafts) for place in order]
    numbers = {node: 1 + rank for rank, node in enumerate(nodes)}
    parents = found.parents[index].tolist()
    for rank, ((branch, depth), parent) in enumerate(zip(nodes, parents, strict=True)):
        assert parent == (numbers[branch, depth - 1] if depth else 0)
        assert parent <= rank, "A node stands before the one that it follows."
