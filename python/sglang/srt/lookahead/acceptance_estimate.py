"""Estimates how many predicted tokens will be accepted."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import NamedTuple

PRIOR_SURVIVAL, PRIOR_TRIALS, WINDOW = 0.3, 2.0, 512.0  # of masks; see `Survival`
FORGETTING_STEPS = 300.0  # a step forgets 1/300 of the trials of places that it does not try


class Kind(NamedTuple):
    """Requests that are expected to accept alike.

    Attributes:
        emits_only_confirmed: see `StepCounts`.
        tau: threshold, in tenths.
        match: of n-grams, the class of the match that the request's drafts follow.
    """

    emits_only_confirmed: bool = True
    tau: int = 0
    match: int = 0


class Trials:
    """Counts drafts tried and right, of which the oldest are forgotten."""

    def __init__(self) -> None:
        self.tried = self.right = 0.0

    def add(self, tried: int, right: int, memory: float) -> None:
        """Adds drafts, and forgets all but `memory` drafts."""
        self.tried += tried
        self.right += right
        if self.tried > memory:
            self.scale(memory / self.tried)

    def scale(self, share: float) -> None:
        """Forgets all but a share."""
        self.tried *= share
        self.right *= share

    def chance(self, prior: float, trials: float) -> float:
        """Returns the share of right drafts, where the prior counts as so many drafts."""
        return (self.right + trials * prior) / (self.tried + trials)


class Survival:
    """Chances of drafts by their place: of a chain, that a draft is right if those before it are;
    of a tree, whose likeliest nodes come first, that a node is right and all that it follows.

    A place that was never tried is taken to be like the one before it: in a tree its chance is as
    small a part of that of the node before it as the first node's is of 1.

    Args:
        num_places: the most drafts of a request.
        prior, prior_trials: chance of a first draft before any was tried, and the trials that it,
            or the chance of the place before, counts as.
        window: trials of a place that are remembered, since text changes.
    """

    def __init__(
        self,
        num_places: int,
        prior: float = PRIOR_SURVIVAL,
        prior_trials: float = PRIOR_TRIALS,
        window: float = WINDOW,
        has_trees: bool = False,
    ) -> None:
        self._trials = [Trials() for _ in range(num_places)]
        self._prior, self._prior_trials = prior, prior_trials
        self._window, self._has_trees = window, has_trees

    def record(self, num_fed: int, right: Collection[int], count: int = 1) -> None:
        """Hears of requests that are alike how many drafts each fed, and which places were right:
        of a chain, the first ones."""
        for place in range(num_fed if self._has_trees else min(num_fed, len(right) + 1)):
            self._trials[place].add(count, count * (place in right), self._window)

    def forget(self, num_fed: int) -> None:
        """Forgets a little of the places that a step of at most so many drafts does not try.
        Called once per step: once per request would make many requests forget within a few steps
        what they have learnt."""
        for trials in self._trials[num_fed:]:
            trials.scale(1.0 - 1.0 / FORGETTING_STEPS)

    def runs(self, most: int) -> list[float]:
        """Tokens that a request is expected to be given with 0, 1, ... `most` drafts."""
        chance, reached, found, part = self._prior, 1.0, [1.0], 1.0
        for place, trials in enumerate(self._trials[:most]):
            chance = trials.chance(chance * part, self._prior_trials)
            if self._has_trees:
                reached, part = chance, part if place else chance
            else:
                reached *= chance
            found.append(found[-1] + reached)
        return found


def with_draftless_steps(runs: list[float]) -> list[float]:
    """Tokens per step of a request that emits only what is confirmed, its steps without drafts
    counted too, from the lengths of the runs of its steps with drafts."""
    pairs = itertools.pairwise(runs)
    return [1.0, *(1.0 + share_with_drafts(before, run) * (run - 1.0) for before, run in pairs)]


def share_with_drafts(before: float, run: float) -> float:
    """Share of a request's steps that have drafts: a step whose drafts are not all confirmed leaves
    none for the next one, which gives one token.

    Args:
        before, run: lengths of its runs; `run` with one token more.
    """
    return 1.0 / (2.0 - (run - before))
