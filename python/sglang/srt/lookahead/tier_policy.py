"""Chooses the tier, the number of drafts that requests verify in the next step, under the current
load.

A `LengthPolicy` grants mask rows to the step that is about to be launched, by what may be pending
there. A tier is chosen one step earlier, when drafts are proposed, since drafting costs too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from sglang.srt.lookahead.rest_rule import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.lookahead.round_prices import RoundPrices, UpcomingRound
from sglang.srt.lookahead.tier_options import TierOptions

MAX_DENSE_TIERS = 5  # with more drafts at most, not every number has graphs
LEAST_GAIN = 0.01  # share by which drafts must beat none: prices and estimates are not exact
PROBE_SHARE = 0.004  # share of the time of steps that probes may cost
FEED_SHARE = 0.0015  # extra share while tier 0 is best and the head must catch up before a probe
PRICE_EVERY = 4  # steps that are padded to as many requests have the same prices of tiers
PROBE_STEPS = 2.5  # steps whose time may be saved up for probes


def same_size(num_reqs: int) -> int:
    """`TierParts.graph_size` without graphs."""
    return num_reqs


@dataclass(frozen=True, slots=True)
class TierParts:
    """The parts that a policy is made of.

    Attributes:
        prices: of rounds; None where none were measured.
        graph_size: maps a number of requests to the number that their step is padded to.
        feed_ms: milliseconds by which a plain step takes longer than its price if the drafter's
            model is not left out of it; None: it never is.
    """

    options: TierOptions
    prices: RoundPrices | None = None
    graph_size: Callable[[int], int] = same_size
    feed_ms: Callable[[UpcomingRound], float] | None = None


class RoundOutcome(NamedTuple):
    """A step that has been read.

    Attributes:
        tier: `TierPolicy.settled` when it was chosen for.
        num_reqs: requests that it was chosen for; fewer may have decoded in it.
        verified: of each request that had drafts, how many, and how many of them were confirmed.
        matched: of each request that fed drafts, the length of the match that they followed, how
            many were fed, and the places of the right ones; where `TierPolicy.reads_matches`.
    """

    tier: int
    num_reqs: int
    verified: Sequence[tuple[int, int]]
    matched: Sequence[tuple[int, int, Collection[int]]] = ()


class TierPolicy(Protocol):
    """Chooses tiers on the host, while the last two steps may not have been read. Reads no clock.

    Attributes:
        needs_prices: whether it goes by prices of rounds, which are then measured at start-up.
        reads_lengths: whether it looks at `UpcomingRound.lengths`, which are None otherwise.
        reads_matches: whether it goes by the matches that drafts follow
            (`UpcomingRound.match_lens`, `RoundOutcome.matched`).
        may_rest: whether it may ever say so.
        settled: the tier of rounds as they come; that of single rounds may be another one, which is
            tried. For people and metrics.
        rests: the drafter's model may be left out of the step that tier 0 was just chosen for:
            no request gets drafts for some time.
    """

    needs_prices: ClassVar[bool]
    reads_lengths: ClassVar[bool]
    reads_matches: ClassVar[bool]
    may_rest: ClassVar[bool]
    settled: int

    @property
    def rests(self) -> bool: ...

    @staticmethod
    def tiers(options: TierOptions) -> tuple[int, ...]:
        """The tiers that it may choose, ascending, up to `max_drafts`."""

    def __init__(self, parts: TierParts) -> None: ...

    def choose(self, upcoming: UpcomingRound) -> int:
        """The drafts that each request is given for its next step."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Hears a step in which requests decoded. Steps come in order."""


class FixedTier:
    """Always all drafts."""

    needs_prices = reads_lengths = reads_matches = may_rest = rests = False

    @staticmethod
    def tiers(options: TierOptions) -> tuple[int, ...]:
        return (options.max_drafts,)

    def __init__(self, parts: TierParts) -> None:
        self.settled = parts.options.max_drafts

    def choose(self, upcoming: UpcomingRound) -> int:
        return self.settled

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns nothing."""


class LoadAwareTier:
    """The tier that gives most tokens per millisecond, by what was confirmed lately (`Stretches`)
    and by the prices of rounds.

    Tiers that are not chosen teach little. So now and then a step probes the cheapest higher one
    that would be best if all drafts beyond the chosen tier were right. Probes are paid from an
    allowance, PROBE_SHARE of the time of steps, which saves up PROBE_STEPS steps.

    Estimates go up and down, so a tier stays until another one beats it by the share that drafts
    must beat none by, or until no drafts beat it at all.

    While no drafts are best the drafter's model rests (`RestRule`), if it can be left out of steps.
    Then a probe begins with steps that only feed it, which the allowance pays too: it gets
    FEED_SHARE more.

    Where `TierOptions.adaptive` says which tiers batches of a size may have, it chooses from these
    and 0.
    """

    needs_prices = reads_lengths = may_rest = True
    reads_matches = False

    @staticmethod
    def tiers(options: TierOptions) -> tuple[int, ...]:
        if options.adaptive is not None:
            return tuple(sorted({0, *options.adaptive.candidate_steps}))
        max_drafts = options.max_drafts
        if max_drafts <= MAX_DENSE_TIERS:
            return tuple(range(max_drafts + 1))
        powers = (1 << power for power in range(max_drafts.bit_length()))
        return (0, 1, *(1 + power for power in powers if 1 + power < max_drafts), max_drafts)

    def __init__(self, parts: TierParts) -> None:
        assert parts.prices is not None, "Tiers go by prices, and none were measured."
        self._prices, self._options = parts.prices, parts.options
        self._graph_size, self._feed_ms = parts.graph_size, parts.feed_ms
        self._tiers = self.tiers(parts.options)
        self._least_gain = max(LEAST_GAIN, parts.prices.spread)
        self._allowance_ms: float | None = None
        self._rest = RestRule()
        self._costs: Mapping[int, float] = {}
        self._size = self._age = 0  # of the costs: requests, padded, and steps
        self.settled = 0

    @property
    def rests(self) -> bool:
        return self._feed_ms is not None and self._rest.rests

    def choose(self, upcoming: UpcomingRound) -> int:
        assert upcoming.lengths is not None, "What tiers give is read (`reads_lengths`)."
        lengths = upcoming.lengths(self._tiers[-1])
        costs = self._costs_ms(upcoming, lengths)
        best = self.settled = self._settle(lengths, costs)
        if upcoming.is_renewed:
            self._rest.renew()
        feed_ms = 0.0
        if self._feed_ms is not None and best == 0:
            feed_ms = self._feed_ms(upcoming.at_pace(lengths[0]))
        wanted = self._with_probe(lengths, costs, feed_ms, upcoming.is_fed)
        can_draft = self._rest.step(wanted > 0, upcoming.is_fed) or self._feed_ms is None
        chosen = wanted if can_draft else 0
        assert self._allowance_ms is not None
        if chosen > best:
            self._allowance_ms -= costs[chosen] - costs[best]
        elif feed_ms and not self._rest.rests:  # where tier 0 comes and goes, owed for one wait
            self._allowance_ms = max(self._allowance_ms - feed_ms, -REST_AFTER * feed_ms)
        return chosen

    def _costs_ms(self, upcoming: UpcomingRound, lengths: Sequence[float]) -> Mapping[int, float]:
        """Milliseconds of a round of each tier that these requests may have, PRICE_EVERY - 1 steps
        old at most: they change slowly, and computing them takes the host long."""
        self._age, size = self._age + 1, self._graph_size(upcoming.num_reqs)
        if self._age >= PRICE_EVERY or size != self._size:
            self._age, self._size = 0, size
            allowed = self._options.candidates(size)
            tiers = self._tiers if allowed is None else sorted({0, *allowed})
            self._costs = costs_of_tiers(self._prices, upcoming, tiers, lengths)
        return self._costs

    def _settle(self, lengths: Sequence[float], costs: Mapping[int, float]) -> int:
        """The best tier, or the one that was settled on before, unless the best one beats that."""
        best, held = best_tier(lengths, costs, self._least_gain), self.settled
        if held not in costs:
            return best
        least = lengths[held] / costs[held] * (1 + self._least_gain * (best > 0))
        return best if lengths[best] / costs[best] > least else held

    def _with_probe(
        self, lengths: Sequence[float], costs: Mapping[int, float], feed_ms: float, is_fed: bool
    ) -> int:
        """The settled tier, or one that is to be probed."""
        best, cost = self.settled, costs[self.settled]
        most_ms = PROBE_STEPS * cost + (CONTEXT_STEPS + REST_AFTER) * feed_ms
        saved_ms = most_ms if self._allowance_ms is None else self._allowance_ms
        share = PROBE_SHARE + FEED_SHARE * (feed_ms > 0)
        self._allowance_ms = min(saved_ms + share * cost, most_ms)
        hopeful = hopeful_tiers(lengths, costs, best, self._least_gain)
        if not hopeful:
            return best
        probed = min(hopeful, key=costs.__getitem__)
        left_ms = self._allowance_ms - self._rest.num_steps_to_feed(is_fed) * feed_ms
        return probed if costs[probed] - cost <= left_ms else best

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns from `Stretches` alone."""


def costs_of_tiers(
    prices: RoundPrices, upcoming: UpcomingRound, tiers: Iterable[int], lengths: Sequence[float]
) -> dict[int, float]:
    """Milliseconds of a round of each tier; lengths as for `best_tier`."""
    return {tier: prices.round_ms(upcoming.at_pace(lengths[tier]), tier) for tier in tiers}


def best_tier(lengths: Sequence[float], costs: Mapping[int, float], least_gain: float = 0.0) -> int:
    """The tier that gives most tokens per millisecond, of equal ones the least; 0 unless it beats
    that by the share `least_gain`.

    Args:
        lengths: tokens that a request is expected to be given with 0, 1, ... drafts.
        costs: milliseconds of a round of each tier, tier 0 among them.
    """
    best = min(costs, key=lambda tier: (-lengths[tier] / costs[tier], tier))
    plain = lengths[0] / costs[0]
    return best if lengths[best] / costs[best] > plain * (1 + least_gain) else 0


def hopeful_tiers(
    lengths: Sequence[float], costs: Mapping[int, float], best: int, least_gain: float
) -> list[int]:
    """Tiers above the best one that would beat it if all their further drafts were right; arguments
    as for `best_tier`."""
    chance = lengths[best] - lengths[best - 1] if best else 1.0  # that the best tier's are right
    least = lengths[best] / costs[best] * (1 + least_gain)
    return [
        tier
        for tier in costs
        if tier > best and (lengths[best] + chance * (tier - best)) / costs[tier] > least
    ]
