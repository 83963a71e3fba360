"""Chooses how many tokens requests predict from masks, under the current load.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from functools import partial

from sglang.srt.lookahead.acceptance_estimate import (
    Kind,
    Survival,
    share_with_drafts,
    with_draftless_steps,
)
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LEAST_GAIN, PRICE_EVERY, Probes, best_tier
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep


class LoadAwareMasks(LengthPolicy):
    """The number of masks that gives most tokens per millisecond, probed like numbers of drafts.

    What counts is how often the tokens of a run were accepted (`Survival`), and the price of a
    step: without its prompts, and what masks add to it beside them. A step is priced with the
    drafts that masks of the step before have left.
    """

    needs_prices = True

    def __init__(self, parts: PolicyParts) -> None:
        assert parts.steps is not None, "Lengths go by prices, and none were measured."
        self._steps, self._max_masks = parts.steps, parts.options.num_steps
        self._survival = defaultdict[Kind, Survival](partial(Survival, self._max_masks))
        self._probes = Probes(max(LEAST_GAIN, parts.steps.spread))
        self._costs = dict[Hashable, Mapping[int, float]]()  # by `UpcomingStep.cache_key`
        self._shares = dict[tuple[Kind, int], float]()  # while those hold
        self._age = 0  # of the costs, in steps

    def choose(self, upcoming: UpcomingStep) -> Budget:
        lengths = [upcoming.beside + each for each in upcoming.mean_lengths(self._runs)]
        costs = self._costs_ms(upcoming)
        best = best_tier(lengths, costs, self._probes.least_gain)
        chosen = self._probes.tier(best, lengths, costs)
        self._probes.pay(costs[chosen] - costs[best])
        for kind in {request.kind for request in upcoming.emitting if request.kind is not None}:
            self._survival[kind].forget(chosen)
        limit = 1 + chosen
        return Budget(limit, self._num_rows(upcoming, limit) if upcoming.is_packed else None)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.record.plan.draft_length == 0:
            return
        alike = Counter(zip(outcome.kinds, outcome.num_tried, outcome.num_accepted, strict=True))
        for (kind, tried, taken), count in alike.items():
            if taken and kind is not None:
                self._survival[kind].record(tried - 1, range(taken - 1), count)

    def _runs(self, kind: Kind) -> list[float]:
        runs = self._survival[kind].runs(self._max_masks)
        return with_draftless_steps(runs) if kind.emits_only_confirmed else runs

    def _costs_ms(self, upcoming: UpcomingStep) -> Mapping[int, float]:
        """Milliseconds of a step by its masks, PRICE_EVERY - 1 steps old at most."""
        self._age += 1
        if self._age >= PRICE_EVERY:
            self._age = 0
            self._costs.clear()
            self._shares.clear()
        if (key := upcoming.cache_key) not in self._costs:
            free = whole = self._steady_ms(upcoming, False)
            if upcoming.prompt_rows:
                whole = self._steady_ms(upcoming, True)
            self._costs[key] = dict(enumerate(free[0] + cost - whole[0] for cost in whole))
        return self._costs[key]

    def _steady_ms(self, upcoming: UpcomingStep, with_prompts: bool) -> list[float]:
        """Prices of a step with 0, 1, ... masks, each while steps are alike."""
        limits, share = range(1, 1 + upcoming.longest), self._share_with_drafts
        shapes = (upcoming.current_shape(n, share, True, with_prompts) for n in limits)
        return list(map(self._steps.price_ms, shapes))

    def _share_with_drafts(self, kind: Kind, k: int) -> float:
        """Returns the share of verified requests of a kind that have drafts when they predict k
        tokens per step."""
        if (kind, k) not in self._shares:
            self._shares[kind, k] = share_with_drafts(*self._survival[kind].runs(k - 1)[-2:])
        return self._shares[kind, k]

    def _num_rows(self, upcoming: UpcomingStep, limit: int) -> int | None:
        """As many rows as requests will probably need, and as many more as the step's graph has
        room for; None if that is enough for all."""
        shape = upcoming.current_shape(limit, self._share_with_drafts)
        key = self._steps.find(shape.num_reqs, shape.widest, shape.num_rows)
        room = shape.num_rows if key is None else key.num_tokens
        return room if room < upcoming.current_shape(limit).num_rows else None
