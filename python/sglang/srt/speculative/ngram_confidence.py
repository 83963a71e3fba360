"""How probable it is that drafts of n-grams are right, by the length of the match behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.speculative.ngram_tier import LONGEST_OF_CLASS, NUM_CLASSES
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE

WINDOW = 512.0  # trials of a cell that are remembered, since text changes
PRIOR_TRIALS = 2.0  # trials that the prior counts as
ABSENT = -1.0  # the score of a node of a branch that has no place; below all others


class Trials:
    """Counts on the device, by cells. Nothing waits for it.

    Attributes:
        tried: float32, of the shape of the prior; drafts that were fed, all before them being
            right.
        right: likewise; of these, the right ones.

    Args:
        prior: float32; the chance that a draft of each cell is right, before any was tried.
    """

    def __init__(self, prior: torch.Tensor) -> None:
        self.tried = torch.zeros_like(prior)
        self.right = torch.zeros_like(prior)
        self._prior_right = PRIOR_TRIALS * prior

    def add(self, cells: torch.Tensor, tried: torch.Tensor, right: torch.Tensor) -> None:
        """Drafts whose cells, in the flattened counts, are `cells` int64; all of one shape, `tried`
        and `right` bool."""
        for counts, were in ((self.tried, tried), (self.right, right)):
            counts.view(-1).index_add_(0, cells.flatten(), were.flatten().to(counts.dtype))
        share = (WINDOW / self.tried.clamp(min=1.0)).clamp(max=1.0)
        self.tried *= share
        self.right *= share

    def chances(self) -> torch.Tensor:
        """Float32, of the shape of the prior; 0 to 1."""
        return (self.right + self._prior_right) / (self.tried + PRIOR_TRIALS)


class MatchConfidence:
    """Of chains: by class of match and place in the chain.

    Attributes:
        trials: [NUM_CLASSES, D]

    Args:
        num_rows: rows of the token table, padding included.
        max_drafts: D.
        padding_row: teaches nothing.
    """

    def __init__(
        self, num_rows: int, max_drafts: int, padding_row: int, device: torch.device
    ) -> None:
        shape = NUM_CLASSES, max_drafts
        self.trials = Trials(torch.full(shape, PRIOR_CONFIDENCE, device=device))
        self._classes = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._bounds = to_device(LONGEST_OF_CLASS, device, torch.int64)
        self._places = torch.arange(max_drafts, device=device)
        self._padding_row = padding_row

    def learn(self, rows: torch.Tensor, num_fed: torch.Tensor, num_right: torch.Tensor) -> None:
        """What became of the drafts that `proposed` was last told of.

        Args:
            rows: [R] int64.
            num_fed: [R] int64; drafts of each that the step fed, 0 where there were none.
            num_right: [R] int64; how many of the first ones were right.
        """
        num_fed = torch.where(rows == self._padding_row, 0, num_fed)[:, None]
        num_right, places = num_right[:, None], self._places
        tried = (places < num_fed) & (places <= num_right)
        cells = self._classes[rows][:, None] * len(places) + places
        self.trials.add(cells, tried, tried & (places < num_right))

    def proposed(self, rows: torch.Tensor, match_lens: torch.Tensor) -> torch.Tensor:
        """[R, D] float32; of drafts that follow matches of these lengths, for
        `RequestRows.write_drafts`; rows, match_lens [R] int64."""
        classes = torch.bucketize(match_lens, self._bounds)
        self._classes[rows] = classes
        return self.trials.chances()[classes]


class OrderedNodes(NamedTuple):
    """The nodes but the root of R trees, each tree's likeliest ones first, so that any first ones
    are a tree.

    Attributes:
        order: [R, D] int64; the place of each among the nodes in the order of branches.
        parents: [R, D] int32; see `DraftTrees.write`.
        scores: [R, D] float32; that a node and all that it follows are right. None is greater than
            the one before it. Nodes of branches without a place stand behind all others, with 0.
        counts: [R] int64; nodes of branches with a place.
    """

    order: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor


class BranchConfidence:
    """Of trees whose branches part at the root: by whether a branch is the first one, by class of
    its match, and by place in the branch.

    Attributes:
        trials: [2, NUM_CLASSES, L]; of first branches, and of all others.

    Args:
        num_rows, padding_row: as for `MatchConfidence`.
        branches: nodes of each of B branches, D in all, L of the longest.
    """

    def __init__(
        self, num_rows: int, branches: Sequence[int], padding_row: int, device: torch.device
    ) -> None:
        longest, num_drafts = max(branches), sum(branches)
        prior = torch.full((2, NUM_CLASSES, longest), PRIOR_CONFIDENCE)
        prior[1, :, 0] = 1 - PRIOR_CONFIDENCE  # of another token than the first branch's
        self.trials = Trials(prior.to(device))
        places = [(branch, place) for branch, size in enumerate(branches) for place in range(size)]
        self._branch_of, self._place_of = to_device(list(zip(*places, strict=True)), device)
        parents = [0 if place == 0 else node for node, (_, place) in enumerate(places)]
        self._parents = to_device(parents, device, torch.int64)  # 0 is the root
        self._is_later = (torch.arange(len(branches), device=device) > 0).to(torch.int64)
        self._bounds = to_device(LONGEST_OF_CLASS, device, torch.int64)
        self._nodes = torch.arange(num_drafts, device=device)
        self._padding_row = padding_row
        # Of the nodes that each row of the table was last given, in their order.
        shape = num_rows, num_drafts
        self._given_cells = torch.zeros(shape, dtype=torch.int64, device=device)
        self._given_parents = torch.zeros_like(self._given_cells)

    def learn(
        self,
        rows: torch.Tensor,
        num_fed: torch.Tensor,
        num_right: torch.Tensor,
        path: torch.Tensor,
    ) -> None:
        """What became of the nodes that `order` last gave.

        Args:
            rows: [R] int64.
            num_fed: [R] int64; the first so many nodes of each were fed.
            num_right: [R] int64; nodes on the confirmed path.
            path: [R, M] integers; the root, 0, then those nodes; what is behind means nothing.
        """
        num_fed = torch.where(rows == self._padding_row, 0, num_fed)[:, None]
        is_on_path = torch.arange(path.shape[1], device=path.device) <= num_right[:, None]
        is_right = torch.zeros((len(rows), 1 + len(self._nodes)), device=path.device).bool()
        is_right.scatter_(1, torch.where(is_on_path, path, 0).to(torch.int64), True)
        tried = (self._nodes < num_fed) & is_right.gather(1, self._given_parents[rows])
        self.trials.add(self._given_cells[rows], tried, tried & is_right[:, 1:])

    def order(self, rows: torch.Tensor, match_lens: torch.Tensor) -> OrderedNodes:
        """
        Args:
            rows: [R] int64.
            match_lens: [R, B] int64; of each branch, 0 where it has no place. The first one is
                there without a place too.
        """
        classes = torch.bucketize(match_lens, self._bounds)
        chances = self.trials.chances()
        # A product that is computed in parallel may rise by a rounding.
        paths = chances[self._is_later, classes].cumprod(2).cummin(2).values
        exists = (match_lens > 0) | (self._is_later == 0)
        scores = torch.where(exists[:, :, None], paths, ABSENT)[:, self._branch_of, self._place_of]
        scores, order = torch.sort(scores, dim=1, descending=True, stable=True)

        numbers = torch.nn.functional.pad(torch.empty_like(order), (1, 0))  # 0 of the root
        numbers.scatter_(1, 1 + order, (1 + self._nodes).expand_as(order))
        parents = numbers.gather(1, self._parents[order])
        longest = chances.shape[2]
        cells = (self._is_later * NUM_CLASSES + classes) * longest
        cells = cells.gather(1, self._branch_of[order]) + self._place_of[order]
        self._given_cells[rows], self._given_parents[rows] = cells, parents
        counts = (scores > ABSENT).sum(1)
        return OrderedNodes(order, parents.to(torch.int32), scores.clamp(min=0.0), counts)
