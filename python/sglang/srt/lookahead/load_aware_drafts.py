"""Chooses how many drafts requests get for their next step, under the current load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.prompt_mix import PromptMix
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.stretches import Stretches
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep

MAX_DENSE_TIERS = 5  # with more drafts at most, not every number has graphs
LEAST_GAIN = 0.01  # share by which drafts must beat none: prices and estimates are not exact
PROBE_SHARE = 0.004  # share of the time of steps that probes may cost
FEED_SHARE = 0.0015  # extra share while tier 0 is best and the head must catch up before a probe
PRICE_EVERY = 8  # steps that are padded to as many requests have the same prices of tiers
PROBE_STEPS = 2.5  # steps whose time may be saved up for probes
REST_AFTER = 16  # steps in a row without drafts
# Steps that the head is fed before it drafts again: after so little context few drafts are right.
CONTEXT_STEPS = 24


class LoadAwareDrafts(LengthPolicy):
    """The tier that gives most tokens per millisecond, by what was confirmed lately (`Stretches`)
    and by the prices of rounds. Now and then a step tries a higher one (`Probes`).

    While no drafts are best the drafter's model rests (`RestRule`), if it can be left out of steps.
    Then a probe begins with steps that only feed it, which the allowance pays too: it gets
    FEED_SHARE more.

    Where `RoundOptions.adaptive` says which tiers batches of a size may have, it chooses from
    these and 0.
    """

    needs_prices = may_rest = True
    least_gain = LEAST_GAIN

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        if options.adaptive is not None:
            return tuple(sorted({0, *options.adaptive.candidate_steps}))
        max_drafts = options.num_steps
        if max_drafts <= MAX_DENSE_TIERS:
            return tuple(range(max_drafts + 1))
        powers = (1 << power for power in range(max_drafts.bit_length()))
        return (0, 1, *(1 + power for power in powers if 1 + power < max_drafts), max_drafts)

    def __init__(self, parts: PolicyParts) -> None:
        assert parts.rounds is not None, "Tiers go by prices, and none were measured."
        self._rounds, self._adaptive = parts.rounds, parts.options.adaptive
        self._stretches = Stretches()
        self._prompts = PromptMix(parts.max_prompt_rows)
        self._graph_size, self._feed_ms = parts.graph_size, parts.feed_ms
        self._tiers = self.tiers(parts.options)
        self._probes = Probes(max(self.least_gain, parts.rounds.spread))
        self._rest = RestRule()
        self._costs = dict[int, Mapping[int, float]]()  # by requests, padded
        self._age = 0  # of the costs, in steps

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self._prompts.plan(upcoming)
        if 2 * upcoming.num_new >= upcoming.num_reqs:
            self._stretches.renew()
            self._rest.renew()
        lengths = [upcoming.beside + length for length in self.lengths(upcoming)]
        costs = self._costs_ms(upcoming, lengths)
        best = self.settled = best_tier(lengths, costs, self._probes.least_gain)
        feed_ms, num_to_feed = 0.0, self._rest.num_steps_to_feed(upcoming.is_fed)
        if self._feed_ms is not None and best == 0:
            feed_ms = self._feed_ms(self._prompts.cases(upcoming, lengths[0]))
        wanted = self._probes.tier(best, lengths, costs, feed_ms, num_to_feed)
        self._rest.step(wanted > 0)
        chosen = wanted if num_to_feed == 0 or self._feed_ms is None else 0
        if chosen > best:
            self._probes.pay(costs[chosen] - costs[best])
        elif feed_ms and not self._rest.rests:  # where tier 0 comes and goes, owed for one wait
            self._probes.pay(feed_ms, -REST_AFTER * feed_ms)
        return Budget(1 + chosen, rests=self._feed_ms is not None and self._rest.rests)

    def lengths(self, upcoming: UpcomingStep) -> list[float]:
        """Tokens that a request with drafts is expected to be given with 0, 1, ... of them."""
        return self._stretches.lengths(self._tiers[-1])

    def _costs_ms(self, upcoming: UpcomingStep, lengths: Sequence[float]) -> Mapping[int, float]:
        """Milliseconds of a round of each tier, PRICE_EVERY - 1 steps old at most: they change
        slowly, and computing them takes the host long."""
        self._age, size = self._age + 1, self._graph_size(upcoming.num_reqs)
        if self._age >= PRICE_EVERY:
            self._age = 0
            self._costs.clear()
        if size not in self._costs:
            tiers = self._tiers
            if self._adaptive is not None:
                tiers = tuple(sorted({0, *self._adaptive.slot(size).candidate_steps}))
            cases = ((tier, self._prompts.cases(upcoming, lengths[tier])) for tier in tiers)
            self._costs[size] = {tier: self._rounds.round_ms(case, tier) for tier, case in cases}
        return self._costs[size]

    def observe(self, outcome: StepOutcome) -> None:
        self._prompts.observe(outcome)
        self._stretches.observe(outcome)


class Probes:
    """Tries tiers that are not best, of which little is learnt else: the cheapest higher one that
    would be best if all drafts beyond the best tier were right.

    Probes are paid from an allowance, PROBE_SHARE of the time of steps, which saves up PROBE_STEPS
    steps.
    """

    def __init__(self, least_gain: float) -> None:
        self.least_gain = least_gain
        self._left_ms = math.inf  # before the first step; later it may fall below 0

    def tier(
        self,
        best: int,
        lengths: Sequence[float],
        costs: Mapping[int, float],
        feed_ms: float = 0.0,
        num_to_feed: int = 0,
    ) -> int:
        """Returns the best tier of a step, or one that is to be probed. Before a probe the
        drafter's model is to be fed in so many steps, which each take so much longer."""
        cost = costs[best]
        most_ms = PROBE_STEPS * cost + (CONTEXT_STEPS + REST_AFTER) * feed_ms
        share = PROBE_SHARE + FEED_SHARE * (feed_ms > 0)
        self._left_ms = min(self._left_ms + share * cost, most_ms)
        # That the best tier's drafts are right.
        chance = lengths[best] - lengths[best - 1] if best else 1.0
        least = lengths[best] / cost * (1 + self.least_gain)
        hopeful = [
            tier
            for tier in costs
            if tier > best and (lengths[best] + chance * (tier - best)) / costs[tier] > least
        ]
        probed = min(hopeful, key=costs.__getitem__, default=best)
        return probed if costs[probed] - cost <= self._left_ms - num_to_feed * feed_ms else best

    def pay(self, ms: float, least_ms: float = -math.inf) -> None:
        """Pays from what is saved, and no more than leaves `least_ms`."""
        self._left_ms = max(self._left_ms - ms, least_ms)


class RestRule:
    """Skips the head after REST_AFTER draft-free steps; a request whose tokens it missed gets
    drafts only after CONTEXT_STEPS catch-up steps."""

    def __init__(self) -> None:
        self.rests = False  # the model is left out of the step at hand
        self._num_idle = 0
        self._num_fed = CONTEXT_STEPS

    def renew(self) -> None:
        """Most requests are new: drafts may follow at once, and the model is then fed the ends of
        their prompts."""
        self._num_fed = CONTEXT_STEPS

    def num_steps_to_feed(self, is_fed: bool) -> int:
        """Steps before there can be drafts, unless the model has KV of all requests' tokens."""
        return 0 if is_fed else max(0, CONTEXT_STEPS - self._num_fed)

    def step(self, wants_drafts: bool) -> None:
        """A step begins."""
        self._num_idle = 0 if wants_drafts else self._num_idle + 1
        self.rests = self._num_idle >= REST_AFTER
        self._num_fed = 0 if self.rests else self._num_fed + 1


def best_tier(lengths: Sequence[float], costs: Mapping[int, float], least_gain: float = 0.0) -> int:
    """The tier that gives most tokens per millisecond, of equal ones the least; 0 unless it beats
    that by the share `least_gain`. `lengths` are the tokens that a request is expected to be given
    with 0, 1, ... drafts, with its share of those of others; costs are milliseconds of tiers."""
    best = min(costs, key=lambda tier: (-lengths[tier] / costs[tier], tier))
    plain = lengths[0] / costs[0]
    return best if lengths[best] / costs[best] > plain * (1 + least_gain) else 0
