"""Says how probable it is that drafts of n-grams are right, by the length of the match before them:
of chains it is learnt, of trees it is fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.matched_drafts import LONGEST_OF_CLASS
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE

WINDOW = 512.0  # trials of a cell that are remembered, since text changes
PRIOR_TRIALS = 2.0  # trials that the prior counts as
# Of trees: drafts after matches of so many tokens are right half of the time; as many tokens count
# as the match of a branch without a place.
EVEN_MATCH, LEAST_MATCH = 4, 0.1
ABSENT = -1.0  # the score of a node that cannot be had; below all others


class MatchConfidence:
    """Chances of chains, by class and place in the chain, counted on the device; nothing waits for
    it. Classes are of matches, unless chains have other scores.

    Attributes:
        tried: [C, D] float32; drafts that were tried, all before them being right.
        right: [C, D] float32; those of them that were right.

    Args:
        num_rows: of the token table, padding included; `padding_row` teaches nothing.
        max_drafts: D.
        bounds: ascending; the greatest score of each class but the last one.
        priors: chances of the C classes before anything is known, or one of each.
    """

    def __init__(
        self,
        num_rows: int,
        max_drafts: int,
        padding_row: int,
        device: torch.device,
        bounds: Sequence[float] = LONGEST_OF_CLASS,
        priors: Sequence[float] = (PRIOR_CONFIDENCE,),
    ) -> None:
        prior = to_device(priors, device, torch.float32)[:, None]
        self._prior_right = PRIOR_TRIALS * prior.expand(1 + len(bounds), max_drafts)
        self.tried, self.right = torch.zeros((2, *self._prior_right.shape), device=device)
        self._classes = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._bounds = to_device(bounds, device, torch.tensor(bounds).dtype)
        self._places = torch.arange(max_drafts, device=device)
        self._padding_row = padding_row

    def learn(self, rows: torch.Tensor, num_fed: torch.Tensor, num_right: torch.Tensor) -> None:
        """Learns how many of the drafts that `proposed` last heard of were fed, and of the first
        ones right; all [R] int64."""
        num_fed = torch.where(rows == self._padding_row, 0, num_fed)[:, None]
        num_right, places = num_right[:, None], self._places
        tried = (places < num_fed) & (places <= num_right)
        cells = self._classes[rows][:, None] * len(places) + places
        for counts, were in ((self.tried, tried), (self.right, tried & (places < num_right))):
            counts.view(-1).index_add_(0, cells.flatten(), were.flatten().to(counts.dtype))
        share = (WINDOW / self.tried.clamp(min=1.0)).clamp(max=1.0)
        self.tried *= share
        self.right *= share

    def proposed(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns [R, D] float32 for `StepOps.write_drafts`, of drafts with these scores [R], such
        as the lengths of the matches that they follow; rows [R] int64."""
        self._classes[rows] = classes = torch.bucketize(scores, self._bounds)
        return ((self.right + self._prior_right) / (self.tried + PRIOR_TRIALS))[classes]


class OrderedNodes(NamedTuple):
    """The nodes but the root of R trees, each tree's likeliest ones first, so that any first ones
    are a tree."""

    order: torch.Tensor  # [R, D] int64; places among the tokens found, D of each branch in turn
    parents: torch.Tensor  # [R, D] int32; see `DraftTrees.write`
    # [R, D] float32, never rising; that a node and all that it follows are right, 0 of no node.
    scores: torch.Tensor
    counts: torch.Tensor  # [R] int64; nodes, D unless the budget of the corpus leaves fewer


def likeliest_nodes(
    match_lens: torch.Tensor,
    in_corpus: torch.Tensor,
    num_drafts: int,
    corpus_budget: int | None = None,
) -> OrderedNodes:
    """Returns the likeliest nodes of branches that part at the root. Their chances never change: a
    branch's drafts are the likelier the longer its match is, and one branch at most begins right.

    Args:
        match_lens: [R, B] int64; lengths of the matches of branches, 0 where they have no place.
            The first branch is there without a place too.
        in_corpus: [R, B] int64; 1 where the place is in the corpus, else 0.
        num_drafts: D, nodes of a tree but the root, and tokens that are known of each branch.
        corpus_budget: nodes of a tree that may come from the corpus, at least 1; None: all.
    """
    nodes = torch.arange(num_drafts, device=match_lens.device)
    matched = match_lens.clamp(min=LEAST_MATCH)
    chances = matched / (matched + EVEN_MATCH)
    others_fail = torch.nn.functional.pad((1 - chances[:, :-1]).cumprod(1), (1, 0), value=1.0)
    scores = others_fail[:, :, None] * chances[:, :, None] ** (1 + nodes)
    is_absent = match_lens == 0
    is_absent[:, 0] = False
    scores = scores.masked_fill(is_absent[:, :, None], ABSENT).flatten(1)
    scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
    if corpus_budget is not None:
        from_corpus = in_corpus.gather(1, order // num_drafts)
        is_beyond = (from_corpus > 0) & (from_corpus.cumsum(1) > corpus_budget)
        scores = torch.where(is_beyond, ABSENT, scores)
        scores, again = torch.sort(scores, dim=1, descending=True, stable=True)
        order = order.gather(1, again)
    numbers = torch.zeros_like(order)  # of nodes; 0 is the root
    scores, order = scores[:, :num_drafts], order[:, :num_drafts]
    numbers.scatter_(1, order, (1 + nodes).expand_as(order))
    before = numbers.gather(1, (order - 1).clamp(min=0))
    parents = torch.where(order % num_drafts == 0, 0, before)
    counts = (scores > ABSENT).sum(1)
    return OrderedNodes(order, parents.to(torch.int32), scores.clamp(min=0.0), counts)
