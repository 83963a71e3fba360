"""Estimates how many tokens a round of any number of drafts gives a request.

Drafts are right in stretches: where one is right, the next one mostly is too. Rounds of few drafts
meet a stretch several times where one of many drafts would have passed it at once. So the share of
right drafts at each place, counted in rounds of one number of drafts, does not say what rounds of
another number would give. Two chances do:

    begin: the first draft is right, after a round that did not confirm all of its drafts.
    stay:  a further draft is right, given that the one before it is.

A round of d drafts is full if all of them are right. The model's own token after them is then
predictable with the chance `stay`, so the first draft of the next round is right with the chance

    again = stay^2 + (1 - stay) begin

The share of rounds after a full one follows from the chances that a round is full,
begin stay^(d - 1) and again stay^(d - 1). With `first` as the chance that a first draft is right,
over rounds of both kinds, a round gives a request

    1 + first (1 + stay + ... + stay^(d - 1))

tokens.
"""

from __future__ import annotations

from collections import defaultdict

from sglang.srt.lookahead.acceptance_estimate import Trials
from sglang.srt.lookahead.upcoming_step import StepOutcome

# Drafts of each kind that are remembered of what runs now: MEMORY_STEPS for each request of a step,
# LEAST_MEMORY at least; and of all that has run.
MEMORY_STEPS, LEAST_MEMORY, PAST_MEMORY = 4.0, 32.0, 512.0
PAST_TRIALS = 6.0  # drafts that the past counts as beside what runs now
FORGETTING_STEPS = 100.0  # a step without drafts of a kind forgets 1/100 of what is known of now
# Before any draft was tried a draft is right with this chance, which counts as FIRST_TRIALS drafts.
FIRST_CHANCE, FIRST_TRIALS = 0.6, 2.0
MOST_CHANCE = 0.995  # every stretch ends


class Stretches:
    """Counts, over all requests, how often stretches of right drafts begin and go on."""

    def __init__(self) -> None:
        # Of drafts that begin a stretch and of further ones: those of now, and of all that ran.
        self._kinds = (Trials(), Trials()), (Trials(), Trials())
        self._was_full = defaultdict[int, bool](bool)  # the last round of the request of each row

    def renew(self) -> None:
        """Most requests are new: they are taken to be like all before them."""
        for now, _ in self._kinds:
            now.scale(0.0)

    def observe(self, outcome: StepOutcome) -> None:
        """Hears a step; one that feeds a request's prompt, without drafts, ends what was before. Of
        drafts that were not fed it is a guess which were right."""
        begun = begun_right = further = further_right = 0
        was_full, rows = self._was_full, outcome.record.rows
        fed = outcome.result.num_drafts or [tried - 1 for tried in outcome.num_tried]
        counts = zip(rows, outcome.num_tried, outcome.num_accepted, fed, strict=True)
        for row, tried, taken, num_fed in counts:
            if tried <= 1:
                was_full[row] = False
                continue
            if not was_full[row]:
                begun += 1
                begun_right += taken > 1
            if taken > 1:
                further += taken - 1 if taken < tried else tried - 2
                further_right += taken - 2
            was_full[row] = 0 < num_fed < taken
        memory = max(LEAST_MEMORY, MEMORY_STEPS * len(rows))
        told = (begun, begun_right), (further, further_right)
        for (now, past), (num_tried, num_right) in zip(self._kinds, told, strict=True):
            if num_tried:
                past.add(num_tried, num_right, PAST_MEMORY)
                now.add(num_tried, num_right, memory)
            else:
                now.scale(1.0 - 1.0 / FORGETTING_STEPS)

    def lengths(self, most: int) -> list[float]:
        """Tokens that a round gives a request with 0, 1, ... `most` drafts. Where little is known
        of now, chances are those of the past."""
        begin, stay = [
            now.chance(past.chance(FIRST_CHANCE, FIRST_TRIALS), PAST_TRIALS)
            for now, past in self._kinds
        ]
        stay = min(stay, MOST_CHANCE)
        more_again = stay * stay - stay * begin  # beyond `begin`
        found, reached, power = [1.0], 0.0, 1.0
        for _ in range(most):
            reached += power
            after_full = begin * power / (1.0 - more_again * power)
            found.append(1.0 + reached * (begin + after_full * more_again))
            power *= stay
        return found
