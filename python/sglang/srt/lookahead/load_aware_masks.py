"""Chooses how many tokens requests predict from masks, under the current load.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from sglang.srt.lookahead.acceptance_estimate import (
    Kind,
    Survival,
    share_with_drafts,
    with_draftless_steps,
)
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts, TrialAllowance
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.step.price_table import StepShape

# Computed options hold for up to OPTIONS_STEPS steps, and for a 1/LEARNT of the steps before.
OPTIONS_STEPS, LEARNT = 16, 8
LUCK_STEPS = 16.0  # decode steps of a lone request: see `_Options.luck_ms`
TRIAL_SHARE = 0.003  # share of the time of plain steps that trials may cost
CERTAINTY = 1.64  # standard deviations: each chance is above the lower end 19 of 20 times


@dataclass(frozen=True, slots=True)
class _Options:
    """The gain of each limit from 1 on over limit 1.

    A token is worth the time that the same requests need for one when no prompt is there: a step
    with prompts is long whatever is predicted in it.
    """

    # The least that each probably gains, with tokens worth what they cost in plain steps: does it
    # beat plain decoding?
    low_ms: list[float]
    # The expected gain and the most, with tokens worth what they cost at the best limit: which one
    # is best, and which one might be?
    mean_ms: list[float]
    high_ms: list[float]
    costs_ms: list[float]  # prices of a step at each, while steps are alike
    token_ms: float  # what a token costs in plain steps
    decode_ms: float  # price of the step at limit 1 without its prompts
    # LUCK_STEPS * decode_ms / adjustable requests; tolerance of the trial budget for short-run bad
    # luck.
    luck_ms: float


class LoadAwareMasks(LengthPolicy):
    """Looks ahead where that surely pays, and otherwise tries it within a small budget.

    A limit pays if the tokens that it brings at least, by what was accepted lately, are worth more
    than its price beside plain decoding. Of those that do, the one that gains most is taken.
    Where none does but one might, the cheapest of these is tried for a step if the trial budget can
    bear that no token of it is accepted. The trial budget is in milliseconds, at first `decode_ms`
    (see `_Options`):

        each step:           budget = min(budget + TRIAL_SHARE * plain_ms, decode_ms + luck_ms)
        limit is sure:       budget += what was gained beside plain decoding - what it cost
        else:                budget -= what the step costs beside plain decoding, when it is chosen
                             budget += half of what was gained, when it has been read
        budget < -luck_ms:   nothing looks ahead

    A step costs what its masks do, and the drafts that the step before has left. So whatever is
    accepted, beside any prompts, and whenever that changes, the time lost to plain decoding stays
    within TRIAL_SHARE and a step or, with few requests at once, a few, as far as prices are right.
    They are not exact, so that a trial may be followed by the next one at once only where it gains
    twice what it costs.
    """

    needs_prices = True

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return tuple(range(options.num_steps + 1))

    def __init__(self, parts: PolicyParts) -> None:
        assert parts.steps is not None, "Lengths go by prices, and none were measured."
        self._prices = parts.steps
        self._max_k = 1 + parts.options.num_steps
        self._survival = defaultdict[Kind, Survival](partial(Survival, self._max_k))
        self._budget = TrialAllowance()
        self._options = dict[Hashable, _Options]()  # by `UpcomingStep.cache_key`
        self._shares = dict[tuple[Kind, int], float]()  # while those options hold
        self._num_steps = self._next_look = 0

    def choose(self, upcoming: UpcomingStep) -> Budget:
        options = self._current_options(upcoming)
        most_ms = options.decode_ms + options.luck_ms
        self._budget.earn(TRIAL_SHARE * options.costs_ms[0], most_ms, options.decode_ms)
        limit, is_sure = self._limit(options)
        shape = upcoming.current_shape(limit, self._share_with_drafts)
        extra_ms = 0.0
        if limit > 1 or not upcoming.is_plain:
            plain = upcoming.current_shape(1, self._share_with_drafts, is_steady=True)
            extra_ms = self._prices.price_ms(shape) - self._prices.price_ms(plain)
        owed_ms, token_ms = extra_ms, options.token_ms
        if not is_sure:
            self._budget.add(-extra_ms)
            owed_ms, token_ms = 0.0, token_ms / 2
        for kind in {request.kind for request in upcoming.emitting if request.kind is not None}:
            self._survival[kind].forget(limit)
        num_rows = self._num_rows(upcoming, limit, shape) if upcoming.is_packed else None
        return Budget(limit, num_rows, owed_ms, token_ms)

    def observe(self, outcome: StepOutcome) -> None:
        budget, gained = outcome.plan.budget, 0
        if budget is None:
            return
        tried_and_taken = outcome.num_tried, outcome.num_accepted
        alike = Counter(zip(outcome.kinds, outcome.is_adjustable, *tried_and_taken, strict=True))
        for (kind, is_adjustable, tried, taken), count in alike.items():
            if tried == 0:
                continue
            gained += count * (taken - 1) * is_adjustable
            if kind is not None:
                self._survival[kind].record(tried, taken, count)
        self._budget.add(gained * budget.token_ms - budget.owed_ms)

    def _limit(self, options: _Options) -> tuple[int, bool]:
        """Returns the limit that pays most or may be tried, and whether it surely pays."""
        costs_ms = options.costs_ms
        limits, left_ms = range(1, 1 + len(costs_ms)), self._budget.left_ms
        if left_ms >= -options.luck_ms:
            least_ms = self._prices.spread * costs_ms[0]  # by which prices are off
            sure = [limit for limit in limits if options.low_ms[limit - 1] > least_ms]
            if sure:
                return max(sure, key=lambda limit: options.mean_ms[limit - 1]), True
        hopeful = [limit for limit in limits if options.high_ms[limit - 1] > 0]
        tried = min(hopeful, default=1, key=lambda limit: costs_ms[limit - 1])
        return (tried if costs_ms[tried - 1] - costs_ms[0] <= left_ms else 1), False

    def _current_options(self, upcoming: UpcomingStep) -> _Options:
        """Those computed before, while steps are alike and little has been learnt since."""
        self._num_steps += 1
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + min(1 + self._num_steps // LEARNT, OPTIONS_STEPS)
            self._options.clear()
            self._shares.clear()
        key = upcoming.cache_key
        if key not in self._options:
            self._options[key] = self._computed_options(upcoming)
        return self._options[key]

    def _computed_options(self, upcoming: UpcomingStep) -> _Options:
        limits, share = range(1, upcoming.longest + 1), self._share_with_drafts

        def steady_ms(with_prompts: bool) -> list[float]:
            shapes = (upcoming.current_shape(n, share, True, with_prompts) for n in limits)
            return list(map(self._prices.price_ms, shapes))

        free = steady_ms(False)
        costs = steady_ms(True) if upcoming.prompt_rows else free
        low, mean, high = (self._tokens(upcoming, off) for off in (-CERTAINTY, 0.0, CERTAINTY))
        worths = [cost / given for cost, given in zip(free, mean, strict=True)]
        num_adjustable = sum(
            count for request, count in upcoming.emitting.items() if request.is_adjustable
        )

        def gains_ms(tokens: Sequence[float], token_ms: float) -> list[float]:
            pairs = zip(tokens, costs, strict=True)
            return [token_ms * (given - tokens[0]) - cost + costs[0] for given, cost in pairs]

        return _Options(
            low_ms=gains_ms(low, worths[0]),
            mean_ms=gains_ms(mean, min(worths)),
            high_ms=gains_ms(high, min(worths)),
            costs_ms=costs,
            token_ms=worths[0],
            decode_ms=free[0],
            luck_ms=LUCK_STEPS / num_adjustable * free[0],
        )

    def _tokens(self, upcoming: UpcomingStep, off: float) -> list[float]:
        """Tokens of all requests together, for each limit from 1 on; off: see `Survival.runs`."""
        totals = [0.0] * upcoming.longest
        runs = dict[Kind, list[float]]()
        for request, count in upcoming.emitting.items():
            kind = request.kind
            if kind is not None and kind not in runs:
                found = self._survival[kind].runs(self._max_k, off)
                runs[kind] = with_draftless_steps(found) if kind.emits_only_confirmed else found
            for place in range(len(totals)):
                length = min(request.k, 1 + place) if request.is_adjustable else request.k
                totals[place] += count * (length if kind is None else runs[kind][length - 1])
        return totals

    def _share_with_drafts(self, kind: Kind, k: int) -> float:
        """Returns the share of verified requests of a kind that have drafts when they predict k
        tokens per step."""
        if k == 1:
            return 1.0
        if (kind, k) not in self._shares:
            self._shares[kind, k] = share_with_drafts(*self._survival[kind].runs(k)[-2:])
        return self._shares[kind, k]

    def _num_rows(self, upcoming: UpcomingStep, limit: int, shape: StepShape) -> int | None:
        """As many rows as requests will probably need, and as many more as the step's graph has
        room for; None if that is enough for all."""
        key = self._prices.find(shape.num_reqs, shape.widest, shape.num_rows)
        room = shape.num_rows if key is None else key.num_tokens
        return room if room < upcoming.current_shape(limit).num_rows else None
