"""Trees of n-grams: how likely their nodes are, the order that follows from it, and what is learnt
of confirmed paths. The oracle is plain Python over branches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sglang.srt.lookahead.matched_drafts import NUM_CLASSES, class_of
from sglang.srt.speculative import ngram_confidence
from sglang.srt.speculative.ngram_confidence import BranchConfidence, OrderedNodes, Trials
from sglang.srt.step.request_rows import confidence_of_scores

NUM_ROWS, PADDING_ROW = 9, 8
CPU = torch.device("cpu")
Node = tuple[int, int]  # branch, and place in it


def confidence_for(num_drafts: int, corpus_budget: int | None = None) -> BranchConfidence:
    return BranchConfidence(NUM_ROWS, num_drafts, PADDING_ROW, CPU, corpus_budget)


def order_of(
    confidence: BranchConfidence,
    rows: Sequence[int],
    lens: Sequence[Sequence[int]],
    in_corpus: Sequence[Sequence[int]] | None = None,
) -> OrderedNodes:
    match_lens = torch.tensor(lens)
    places = torch.zeros_like(match_lens) if in_corpus is None else torch.tensor(in_corpus)
    return confidence.order(torch.tensor(rows), match_lens, places)


def score_of(chances: torch.Tensor, lens: Sequence[int], node: Node) -> float:
    """Returns the score of the path to a node, by chances [2, NUM_CLASSES, D]."""
    branch, last = node
    of_branch = chances[min(branch, 1), class_of(lens[branch])]
    return float(of_branch[: last + 1].double().prod())


def random_lens(luck: random.Random, num_branches: int) -> list[int]:
    """Draws the lengths of the places found, descending; some branches have none."""
    found = sorted((luck.choice([1, 2, 3, 6, 12]) for _ in range(num_branches)), reverse=True)
    num_found = luck.randint(0, num_branches)
    return [*found[:num_found], *[0] * (num_branches - num_found)]


def scramble(trials: Trials, certain: float) -> None:
    """Anything may have been learnt, beside drafts that were all right."""
    tried = torch.randint(0, 300, trials.tried.shape).float()
    trials.tried.copy_(tried + certain)
    trials.right.copy_((tried * torch.rand(tried.shape)).floor() + certain)


SHAPES = [(1, 1), (4, 4), (7, 3), (11, 10), (63, 6)]  # nodes and branches


@pytest.mark.long_matrix
@pytest.mark.parametrize("corpus_budget", [None, 1, 4])
@pytest.mark.parametrize(("num_drafts", "breadth"), SHAPES)
def test_any_first_nodes_are_the_likeliest_tree(
    num_drafts: int, breadth: int, corpus_budget: int | None
) -> None:
    """Whatever was learnt, and however many branches there are. The oracle takes one node after the
    other, each the likeliest one behind those that it has, and of the corpus as many as may be."""
    luck, confidence = random.Random(num_drafts), confidence_for(num_drafts, corpus_budget)
    for number in range(20):
        scramble(confidence.trials, 0.0 if number else 1e12)  # at first all chances are 1
        rows = luck.sample(range(NUM_ROWS), 5)
        lens = [random_lens(luck, breadth) for _ in rows]
        in_corpus = [[luck.randint(0, 1) * (each > 0) for each in of_row] for of_row in lens]
        found = order_of(confidence, rows, lens, in_corpus)
        torch.testing.assert_close(confidence_of_scores(found.scores).cumprod(1), found.scores)
        for index, (match_lens, corpus) in enumerate(zip(lens, in_corpus, strict=True)):
            chances = confidence.trials.chances()
            scores = likeliest(match_lens, corpus, chances, num_drafts, corpus_budget)
            check_order(found, index, num_drafts)
            count = int(found.counts[index])
            assert count == len(scores)
            nodes = [divmod(place, num_drafts) for place in found.order[index, :count].tolist()]
            assert number or nodes == sorted(nodes), "equal nodes keep the order of branches"
            assert all(branch == 0 or match_lens[branch] > 0 for branch, _ in nodes)
            num_given = sum(corpus[branch] for branch, _ in nodes)
            assert corpus_budget is None or num_given <= corpus_budget
            own = [score_of(chances, match_lens, node) for node in nodes]
            told = found.scores[index].tolist()
            assert told[:count] == pytest.approx(own, rel=1e-4, abs=1e-30)
            assert told[:count] == pytest.approx(scores, rel=1e-4, abs=1e-30)
            assert not any(told[count:])


def likeliest(
    lens: Sequence[int],
    in_corpus: Sequence[int],
    chances: torch.Tensor,
    num_drafts: int,
    corpus_budget: int | None,
) -> list[float]:
    """Scores of the nodes of a tree, one behind the other."""
    left = num_drafts * len(lens) if corpus_budget is None else corpus_budget
    lengths = [0 if branch and not size else num_drafts for branch, size in enumerate(lens)]
    taken, scores = [0] * len(lens), list[float]()
    while len(scores) < num_drafts:
        offered = [
            (score_of(chances, lens, (branch, taken[branch])), -branch)
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


@pytest.mark.parametrize("corpus_budget", [None, 3])
@pytest.mark.parametrize(("num_drafts", "breadth"), SHAPES)
def test_what_is_learnt_is_what_paths_say(
    num_drafts: int, breadth: int, corpus_budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeds parts of trees of any number of branches: a node was tried if it was fed and the one
    before it in its branch was right. Requests without drafts, steps that emit nothing and padding
    teach nothing. Of more than a window of trials the oldest are forgotten."""
    monkeypatch.setattr(ngram_confidence, "WINDOW", 20.0)
    luck, confidence = random.Random(num_drafts), confidence_for(num_drafts, corpus_budget)
    tried, right = np.zeros((2, 2, NUM_CLASSES, num_drafts))
    num_forgotten = 0
    for _ in range(40):
        rows = [*luck.sample(range(PADDING_ROW), 4), PADDING_ROW, PADDING_ROW]
        lens = [random_lens(luck, breadth) for _ in rows]
        lens[-1] = lens[-2]
        in_corpus = [[luck.randint(0, 1)] * breadth for _ in rows]
        in_corpus[-1] = in_corpus[-2]
        found = order_of(confidence, rows, lens, in_corpus)
        fed = [luck.randint(0, int(count)) for count in found.counts]
        paths = list[list[int]]()
        for index, row in enumerate(rows):
            places = found.order[index].tolist()
            order = [divmod(place, num_drafts) for place in places][: fed[index]]
            branch, length = luck.randrange(breadth), luck.randint(0, num_drafts)
            path = [node for node in order if node[0] == branch][:length]
            paths.append([0, *(1 + order.index(node) for node in path)])
            for own_branch, place in order if row != PADDING_ROW else ():
                cell = min(own_branch, 1), class_of(lens[index][own_branch]), place
                tried[cell] += place == 0 or (own_branch, place - 1) in path
                right[cell] += (own_branch, place) in path
        num_forgotten += int((tried > 20).sum())
        share = 20 / tried.clip(min=20)
        tried, right = tried * share, right * share
        width = max(map(len, paths))
        padded = [path + [-1] * (width - len(path)) for path in paths]
        pairs = zip(paths, fed, strict=True)  # a step that emits nothing has -1 right drafts
        num_right = torch.tensor([len(path) - 1 if count else -1 for path, count in pairs])
        told = torch.tensor(padded, dtype=torch.int32)
        confidence.learn(torch.tensor(rows), torch.tensor(fed), num_right, told)
    assert num_forgotten
    assert confidence.trials.tried.numpy() == pytest.approx(tried, rel=1e-5)
    assert confidence.trials.right.numpy() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("length", [0, 1, 2, 4, 8, 18])
def test_before_anything_is_known_the_first_branch_is_the_likeliest(length: int) -> None:
    """Compares the nodes at each place in their branches."""
    found = order_of(confidence_for(11), [0], [[length] * 4])
    order = [divmod(place, 11) for place in found.order[0].tolist()]
    assert order[:3] == [(0, 0), (0, 1), (0, 2)]
    assert found.scores[0, :3].tolist() == pytest.approx([0.7, 0.7**2, 0.7**3])
    assert all(order.index((0, place)) <= order.index((branch, place)) for branch, place in order)
