"""Chooses how many tokens requests predict from masks, under the current load.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from sglang.srt.lookahead.acceptance_estimate import Kind, Survival, with_draftless_steps
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import PRICE_EVERY, LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep


class LoadAwareMasks(LoadAwareDrafts):
    """The number of masks that gives most tokens per millisecond, probed like numbers of drafts.

    What counts is how often the tokens of a run were accepted (`Survival`), and the price of a
    step: without its prompts, and what masks add to it beside them. A step is priced with the
    drafts that masks of the step before have left.
    """

    may_rest = False

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return tuple(range(options.num_steps + 1))

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts)
        assert parts.steps is not None, "Lengths go by prices, and none were measured."
        self._steps = parts.steps
        self._max_k = 1 + parts.options.num_steps
        self._survival = defaultdict[Kind, Survival](partial(Survival, self._max_k))
        self._known = dict[Hashable, Mapping[int, float]]()  # costs by `UpcomingStep.cache_key`

    def choose(self, upcoming: UpcomingStep) -> Budget:
        budget = super().choose(upcoming)
        for kind in {request.kind for request in upcoming.emitting if request.kind is not None}:
            self._survival[kind].forget(budget.limit)
        return budget

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.plan.budget is None:
            return
        tried_and_taken = outcome.num_tried, outcome.num_accepted
        alike = Counter(zip(outcome.kinds, *tried_and_taken, strict=True))
        for (kind, tried, taken), count in alike.items():
            if tried and kind is not None:
                self._survival[kind].record(tried, taken, count)

    def lengths(self, upcoming: UpcomingStep) -> list[float]:
        """Tokens that a request which looks ahead is given with 0, 1, ... masks, on average."""
        totals, num_ahead = [0.0] * upcoming.longest, 0
        runs = dict[Kind, list[float]]()
        for request, count in upcoming.emitting.items():
            if request.k == 1:
                continue
            num_ahead += count
            kind = request.kind
            if kind is not None and kind not in runs:
                found = self._survival[kind].runs(self._max_k)
                runs[kind] = with_draftless_steps(found) if kind.emits_only_confirmed else found
            for place in range(len(totals)):
                length = min(request.k, 1 + place) if request.is_adjustable else request.k
                totals[place] += count * (length if kind is None else runs[kind][length - 1])
        return [total / num_ahead for total in totals]

    def _costs_ms(self, upcoming: UpcomingStep, lengths: Sequence[float]) -> Mapping[int, float]:
        self._age += 1
        if self._age >= PRICE_EVERY:
            self._age = 0
            self._known.clear()
        if (key := upcoming.cache_key) not in self._known:
            free = whole = self._steady_ms(upcoming, False)
            if upcoming.prompt_rows:
                whole = self._steady_ms(upcoming, True)
            self._known[key] = dict(enumerate(free[0] + cost - whole[0] for cost in whole))
        return self._known[key]

    def _steady_ms(self, upcoming: UpcomingStep, with_prompts: bool) -> list[float]:
        """Prices of a step with 0, 1, ... masks, each while steps are alike."""
        limits = range(1, 1 + upcoming.longest)
        shapes = (upcoming.current_shape(limit, True, with_prompts) for limit in limits)
        return list(map(self._steps.price_ms, shapes))
