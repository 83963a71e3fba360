"""Estimates how many predicted tokens will be accepted."""

from __future__ import annotations

import itertools
from typing import NamedTuple

PRIOR_SURVIVAL = 0.3  # of a prediction, given that the one before it was accepted
PRIOR_TRIALS = 2.0  # trials that the prior counts as
WINDOW = 512.0  # trials of a position that are remembered, since text changes
FORGETTING_STEPS = 300.0  # a step forgets 1/300 of the trials of positions that it does not try


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
    """Chances that a token of a run is accepted, given that the one before it is; entry 0 is the
    second token of a run, entry j the one after j + 1 others. What was never tried is taken to
    survive like the entry before it."""

    def __init__(self, max_k: int) -> None:
        self._trials = [Trials() for _ in range(max_k - 1)]

    def record(self, num_tried: int, num_accepted: int, num_runs: int = 1) -> None:
        """Counts runs that could have had `num_tried` tokens each and had `num_accepted`."""
        for j in range(min(num_tried - 1, num_accepted)):
            self._trials[j].add(num_runs, num_runs * (num_accepted >= j + 2), WINDOW)

    def forget(self, limit: int) -> None:
        """Forgets a little of the positions that a step of at most `limit` tokens does not try.
        Called once per step: once per request would make many requests forget within a few steps
        what they have learnt."""
        for trials in self._trials[limit - 1 :]:
            trials.scale(1.0 - 1.0 / FORGETTING_STEPS)

    def runs(self, longest: int) -> list[float]:
        """Mean lengths of runs of at most 1, 2, ... `longest` tokens."""
        survival, reached, found = PRIOR_SURVIVAL, 1.0, [1.0]
        for seen in self._trials[: longest - 1]:
            survival = seen.chance(survival, PRIOR_TRIALS)
            reached *= survival
            found.append(found[-1] + reached)
        return found


def with_draftless_steps(runs: list[float]) -> list[float]:
    """Tokens per step of a request that emits only what is confirmed, its steps without drafts
    counted too, from the lengths of the runs of its steps with drafts. A step whose drafts are not
    all confirmed leaves none for the next one, which gives one token."""
    pairs = itertools.pairwise(runs)
    return [1.0, *(1.0 + (run - 1.0) / (2.0 - (run - before)) for before, run in pairs)]
