"""Chooses the tier, the number of drafts that requests verify in the next step, under the current
load.

A `LengthPolicy` grants mask rows to the step that is about to be launched, by what may be pending
there. A tier is chosen one step earlier, when drafts are proposed, since drafting costs too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from sglang.srt.speculative.rest_rule import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.speculative.rival_times import RivalTimes
from sglang.srt.speculative.round_options import TierOptions
from sglang.srt.speculative.round_prices import RoundPrices, UpcomingRound

MAX_DENSE_TIERS = 5  # with more drafts at most, not every number has graphs
LEAST_GAIN = 0.01  # share by which drafts must beat none: prices and estimates are not exact
PROBE_SHARE = 0.004  # share of the time of steps that probes may cost
FEED_SHARE = 0.0015  # extra share while tier 0 is best and the head must catch up before a probe
PROBE_STEPS = 2.5  # steps whose time may be saved up for probes
FAR_PROBES = 4  # one in FAR_PROBES looks further than the cheapest
DEAREST_PROBE = 1.0  # steps that a probe may cost beyond one of the chosen tier
# What drafts of a probe confirm is worth this share of their tokens: some of these the steps after
# it would have given too.
WORTH = 0.5
# The best tier's rivals are those that it beats by less than this share: prices may be wrong by as
# much.
RIVAL_GAIN = 0.1
# What tiers give and cost is looked at every few steps, but for the first ones: then it changes
# slowly, and looking takes time.
LOOK_EVERY, FIRST_STEPS = 4, 32


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
        is_timed: rounds are timed while they serve, and prices follow.
    """

    options: TierOptions
    prices: RoundPrices | None = None
    graph_size: Callable[[int], int] = same_size
    feed_ms: Callable[[UpcomingRound], float] | None = None
    is_timed: bool = False


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
    """The tier that gives most tokens per millisecond, by what was confirmed lately (`RequestMix`).

    Tiers that are not chosen teach little. So now and then a step probes a higher one that would
    be best if all drafts beyond the chosen tier were right: mostly the cheapest of these, and the
    others in turn, but for those that cost more than DEAREST_PROBE steps. Probes are paid from an
    allowance:

        each step:   allowance = min(allowance + PROBE_SHARE * price, PROBE_STEPS * price)
        a probe:     allowance -= what its round costs beyond the chosen one
        its result:  allowance += WORTH * the time of the tokens confirmed beyond the chosen tier

    A probe beyond no drafts is followed by a second one. After a step without drafts no one knows
    whether its token was predictable, so the first one says how often tokens are, and the second
    how often after such and after others: that is what rounds of drafts depend on.

    So probes whose drafts are wrong become rare, and those whose drafts are right follow soon.
    What all of them lose stays within PROBE_SHARE of the time and PROBE_STEPS steps, as far as
    prices are right: with `TileSpec` a probe costs more than its price, that of a cut step.

    Estimates go up and down, so a tier stays until another one beats it by the share that drafts
    must beat none by, or until no drafts beat it at all.

    Prices may be wrong by a few percent, those of each tier by another share, and only rounds that
    are run are timed. So while drafts are best, some steps are of a rival, one that gains nearly as
    much: no drafts, fewer, or more (`RivalTimes`).

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
        options, prices = parts.options, parts.prices
        assert prices is not None, "Tiers go by prices, and none were measured."
        self._prices = prices
        self._options = options
        self._graph_size = parts.graph_size
        self._tiers = self.tiers(options)
        self._least_gain = max(LEAST_GAIN, prices.spread)
        self.settled = 0
        self._allowance_ms: float | None = None
        self._num_probes = 0
        self._repeated = 0  # a tier that is probed once more; 0: none
        self._best = 0
        self._lengths: Sequence[float] = ()
        self._costs: Mapping[int, float] = {}
        self._num_reqs = self._num_steps = 0
        self._token_ms = 0.0  # of the requests' tokens at the best tier
        self._feed_ms, self._is_timed = parts.feed_ms, parts.is_timed
        self._rest = RestRule()
        self._rivals = RivalTimes()

    @property
    def rests(self) -> bool:
        return self._feed_ms is not None and self._rest.rests

    def choose(self, upcoming: UpcomingRound) -> int:
        self._look(upcoming)
        lengths, costs = self._lengths, self._costs
        best = self._settle(best_tier(lengths, costs, self._least_gain), lengths, costs)
        self.settled = best
        feed_ms = 0.0
        if self._feed_ms is not None and best == 0:
            feed_ms = self._feed_ms(upcoming.at_pace(lengths[0]))
        wanted = self._with_probes(upcoming, lengths, costs, feed_ms)
        can_draft = self._rest.step(wanted > 0, upcoming.is_fed) or self._feed_ms is None
        chosen = wanted if can_draft else 0
        self._pay(costs, chosen, feed_ms)
        is_first = chosen > self.settled and not self._repeated
        self._num_probes += is_first
        self._repeated = chosen if is_first and self.settled == 0 else 0
        return chosen

    def _look(self, upcoming: UpcomingRound) -> None:
        """At the tokens that a request is expected to be given with 0, 1, ... drafts, and at the
        milliseconds of a round of each tier that these requests may have."""
        is_due = self._num_steps < FIRST_STEPS or self._num_steps % LOOK_EVERY == 0
        self._num_steps += 1
        if is_due:
            assert upcoming.lengths is not None, "What tiers give is read (`reads_lengths`)."
            self._lengths = upcoming.lengths(self._tiers[-1])
        if is_due or upcoming.num_reqs != self._num_reqs:
            self._num_reqs = upcoming.num_reqs
            allowed = self._options.candidates(self._graph_size(self._num_reqs))
            tiers = self._tiers if allowed is None else sorted({0, *allowed})
            self._costs = costs_of_tiers(self._prices, upcoming, tiers, self._lengths)

    def _settle(self, best: int, lengths: Sequence[float], costs: Mapping[int, float]) -> int:
        """The best tier, or the one that was settled on before, unless the best one beats that."""
        held = self.settled
        if held not in costs:
            return best
        least = lengths[held] / costs[held] * (1 + self._least_gain * (best > 0))
        return best if lengths[best] / costs[best] > least else held

    def _with_probes(
        self,
        upcoming: UpcomingRound,
        lengths: Sequence[float],
        costs: Mapping[int, float],
        feed_ms: float,
    ) -> int:
        """The settled tier, or one that is to be probed."""
        best = self.settled
        cost = costs[best]
        self._best, self._token_ms = best, cost / (upcoming.num_reqs * lengths[best])
        most_ms = PROBE_STEPS * cost + (CONTEXT_STEPS + REST_AFTER) * feed_ms
        saved_ms = most_ms if self._allowance_ms is None else self._allowance_ms
        share = PROBE_SHARE + FEED_SHARE * (feed_ms > 0)
        self._allowance_ms = min(saved_ms + share * cost, most_ms)
        hopeful = [
            tier
            for tier in hopeful_tiers(lengths, costs, best, self._least_gain)
            if costs[tier] - cost < DEAREST_PROBE * cost
        ]
        rival = self._timed_rival(lengths, costs)
        if rival is not None:
            return rival
        if best == 0 and self._repeated in hopeful:
            return self._repeated
        if not hopeful:
            return best
        hopeful.sort(key=lambda tier: costs[tier])
        turn, is_near = divmod(self._num_probes, FAR_PROBES)
        probed = hopeful[0 if is_near else turn % len(hopeful)]
        left_ms = self._allowance_ms - self._rest.num_steps_to_feed(upcoming.is_fed) * feed_ms
        run_ms = left_ms if best else left_ms / 2  # of each probe
        if feed_ms and costs[probed] - cost > run_ms:  # nothing is saved while the model is fed
            probed = hopeful[0]
        return best if costs[probed] - cost > run_ms else probed

    def _timed_rival(self, lengths: Sequence[float], costs: Mapping[int, float]) -> int | None:
        """A tier that is not best and that the next step has so that it is timed."""
        best = self.settled
        if best == 0 or not self._is_timed:
            return None
        least = lengths[best] / costs[best] / (1 + RIVAL_GAIN)
        rivals = [tier for tier in costs if tier != best and lengths[tier] / costs[tier] > least]
        return self._rivals.choose(self._num_steps, self._num_reqs, rivals)

    def _pay(self, costs: Mapping[int, float], chosen: int, feed_ms: float) -> None:
        """Pays from the allowance what the next step costs beyond one of the settled tier."""
        assert self._allowance_ms is not None
        if chosen > self.settled:
            self._allowance_ms -= costs[chosen] - costs[self.settled]
        elif not self._rest.rests:
            self._allowance_ms -= feed_ms

    def observe(self, outcome: RoundOutcome) -> None:
        settled = max(outcome.tier, self._best)
        num_beyond = sum(max(0, confirmed - settled) for _, confirmed in outcome.verified)
        if num_beyond:
            assert self._allowance_ms is not None, "A step that was not chosen for."
            self._allowance_ms += WORTH * num_beyond * self._token_ms


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
