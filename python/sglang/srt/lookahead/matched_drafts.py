"""Chooses how many drafts of n-grams requests get, by the lengths of the matches that they would
follow.

Text that repeats itself begins and ends from one step to the next, and the length of a match shows
it at once: long matches go on, short ones are chance. So what was confirmed is counted for each
class of matches, and a step is judged by the matches that its requests had last. Of a tree the
match is that of its first branch, the longest one.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

from sglang.srt.lookahead.acceptance_estimate import Kind, Survival
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LoadAwareDrafts
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep

# The longest match of each class but the last one; 0 is the class of those without a place.
LONGEST_OF_CLASS = (0, 1, 2, 4, 8)
NUM_CLASSES = len(LONGEST_OF_CLASS) + 1
# Before anything is known: that a first draft is right, by class, and trials that this counts as.
PRIORS, PRIOR_TRIALS = (0.02, 0.1, 0.25, 0.5, 0.7, 0.9), 4.0
WINDOW = 256.0  # trials of a class and place that are remembered, since text changes

KINDS = tuple(Kind(match=number) for number in range(NUM_CLASSES))  # of requests, by class


def class_of(match_len: int) -> int:
    """Returns the class of a match of `match_len` tokens."""
    return bisect.bisect_left(LONGEST_OF_CLASS, match_len)


class MatchedDrafts(LoadAwareDrafts):
    """The tier that gives most tokens per millisecond, by the matches of the requests at hand."""

    reads_matches, may_rest = True, False
    least_gain = 0.03  # what is known of a class goes up and down more than what is of all

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts)
        most, has_trees = parts.options.num_steps, parts.options.has_trees
        self._survival = [Survival(most, each, PRIOR_TRIALS, WINDOW, has_trees) for each in PRIORS]

    def lengths(self, upcoming: UpcomingStep) -> list[float]:
        most = self._tiers[-1]
        return upcoming.mean_lengths(lambda kind: self._survival[kind.match].runs(most))

    def observe(self, outcome: StepOutcome) -> None:
        self._prompts.observe(outcome)
        fed = zip(outcome.kinds, outcome.result.num_drafts, strict=False)
        for index, (kind, num_fed) in enumerate(fed):
            if num_fed and kind is not None:
                self._survival[kind.match].record(num_fed, right_places(outcome, index))


def right_places(outcome: StepOutcome, index: int) -> Collection[int]:
    """Returns the places of the drafts of a request that were fed and right: of a tree its nodes
    but the root, counted from 0."""
    result = outcome.result
    num_right = min(outcome.num_accepted[index] - 1, result.num_drafts[index])
    if not result.paths:
        return range(num_right)
    return [node - 1 for node in result.paths[index][1 : 1 + num_right]]
