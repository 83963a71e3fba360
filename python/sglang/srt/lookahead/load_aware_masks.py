"""Chooses how many tokens requests predict from masks, under the current load.

More predictions per request cost more rows per step. While a step is bound by reading the weights
they are nearly free; beyond that each row costs time, and rows of predictions that will not be
accepted should go.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from sglang.srt.lookahead.acceptance_estimate import (
    Estimate,
    Kind,
    Survival,
    share_with_drafts,
    with_draftless_steps,
)
from sglang.srt.lookahead.contract import Budget, Stakes
from sglang.srt.lookahead.length_policy import PolicyParts, TrialAllowance
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.step.price_table import StepShape

OPTIONS_STEPS, OPTIONS_TRIALS = 16, 32  # computed options hold for that many steps and trials
LUCK_STEPS = 16.0  # decode steps of a lone request: see `_Options.luck_ms`
TRIAL_SHARE = 0.003  # share of the time of plain steps that trials may cost


@dataclass(frozen=True, slots=True)
class _Options:
    """The gain of each limit from 1 on over limit 1.

    A token is worth the time that the same requests need for one when no prompt is there: a step
    with prompts is long whatever is predicted in it.

    Attributes:
        gains_ms: with tokens worth what they cost in plain steps: does it beat plain decoding?
        values_ms: with tokens worth what they cost at the best limit: which limit is best now?
        plain_token_ms: what a token costs in plain steps.
        plain_ms: price of the step at limit 1.
        decode_ms: the same without its prompts.
        luck_ms: LUCK_STEPS * decode_ms / adjustable requests; tolerance of the trial budget for
            short-run bad luck.
    """

    gains_ms: list[Estimate]
    values_ms: list[Estimate]
    plain_token_ms: float
    plain_ms: float
    decode_ms: float
    luck_ms: float


class LoadAwareMasks:
    """Looks ahead where that surely pays, and otherwise tries it within a small budget.

    A limit pays if the tokens that it brings at least, by what was accepted lately, are worth more
    than its price beside plain decoding. Of those that do, the one that probably gains most is
    taken. Where none does but one might, it is tried for a step if the trial budget can bear that
    no token of it is accepted. The trial budget is in milliseconds, at first `decode_ms` (see
    `_Options`):

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
    reads_matches = may_rest = False
    settled = 0

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return tuple(range(options.num_steps + 1))

    def __init__(self, parts: PolicyParts) -> None:
        assert parts.steps is not None, "Lengths go by prices, and none were measured."
        self._prices = parts.steps
        self._max_k = 1 + parts.options.num_steps
        self._survival = defaultdict[Kind, Survival](partial(Survival, self._max_k))
        self._budget = TrialAllowance()
        self._options_of: tuple[Hashable, _Options] | None = None
        self._options_age = self._num_trials = 0
        self._least_loss_ms = 0.0  # of trials, while those options hold
        self._shares: dict[tuple[Kind, int], float] = {}  # while those options hold

    def choose(self, upcoming: UpcomingStep) -> Budget:
        options = self._current_options(upcoming)
        most_ms = options.decode_ms + options.luck_ms
        self._budget.earn(TRIAL_SHARE * options.plain_ms, most_ms, options.decode_ms)
        longest = self._longest(upcoming)
        if sure := [limit for limit in self._sure(options) if limit <= longest]:
            limit = max(1, *sure, key=lambda limit: options.values_ms[limit - 1].high)
        else:
            limit = self._trial(options, upcoming, longest)
        extra_ms = 0.0
        if limit > 1 or not upcoming.is_plain:
            extra_ms = self._extra_ms(upcoming, limit)
        stakes = Stakes(extra_ms, options.plain_token_ms)
        if not sure:
            self._budget.add(-extra_ms)
            stakes = Stakes(0.0, options.plain_token_ms / 2)
        for kind in {request.kind for request in upcoming.emitting if request.kind is not None}:
            self._survival[kind].forget(limit)
        num_rows = self._num_rows(upcoming, limit) if upcoming.is_packed else None
        return Budget(limit, num_rows, stakes)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.plan.budget is None:
            return
        stakes = outcome.plan.budget.stakes
        assert stakes is not None, "The policy gave it."
        num_adjustable = num_tokens = 0
        tried_and_taken = outcome.num_tried, outcome.num_accepted
        alike = Counter(zip(outcome.kinds, outcome.is_adjustable, *tried_and_taken, strict=True))
        for (kind, is_adjustable, tried, taken), count in alike.items():
            if tried == 0:
                continue
            if is_adjustable:
                num_adjustable += count
                num_tokens += count * taken
            if kind is not None:
                self._survival[kind].record(tried, taken, count)
                self._num_trials += count * (tried > 1)
        self._budget.add((num_tokens - num_adjustable) * stakes.token_ms - stakes.owed_ms)

    def _current_shape(self, upcoming: UpcomingStep, limit: int) -> StepShape:
        return upcoming.current_shape(limit, self._share_with_drafts)

    def _num_rows(self, upcoming: UpcomingStep, limit: int) -> int | None:
        """As many rows as requests will probably need, and as many more as the step's graph has
        room for; None if that is enough for all."""
        shape = self._current_shape(upcoming, limit)
        key = self._prices.find(shape.num_reqs, shape.widest, shape.num_rows)
        room = shape.num_rows if key is None else key.num_tokens
        return room if room < upcoming.current_shape(limit).num_rows else None

    def _share_with_drafts(self, kind: Kind, k: int) -> float:
        """Returns the share of verified requests of a kind that have drafts when they predict k
        tokens per step: a step whose drafts are not all confirmed leaves none for the next one."""
        if k == 1:
            return 1.0
        if (kind, k) not in self._shares:
            runs = self._survival[kind].runs(k)
            self._shares[kind, k] = share_with_drafts(runs[-2], runs[-1], runs[-1].mean - 1)
        return self._shares[kind, k]

    def _current_options(self, upcoming: UpcomingStep) -> _Options:
        """Those computed before, while steps are alike and little has been learnt since."""
        cache_key = upcoming.cache_key
        self._options_age += 1
        is_old = self._options_age > OPTIONS_STEPS or self._num_trials >= OPTIONS_TRIALS
        if self._options_of is None or is_old or self._options_of[0] != cache_key:
            self._shares.clear()
            self._options_of = cache_key, self._options(upcoming)
            self._options_age = self._num_trials = 0
            self._least_loss_ms = 0.0
        return self._options_of[1]

    def _options(self, upcoming: UpcomingStep) -> _Options:
        limits = range(1, upcoming.longest + 1)
        tokens, share = self._tokens(upcoming), self._share_with_drafts

        def steady_ms(with_prompts: bool) -> list[float]:
            shapes = (upcoming.current_shape(n, share, True, with_prompts) for n in limits)
            return list(map(self._prices.price_ms, shapes))

        free = steady_ms(False)
        costs = steady_ms(True) if upcoming.prompt_rows else free

        def beside_plain(token_ms: float) -> list[Estimate]:
            return [
                Estimate(*(token_ms * (n - tokens[0].mean) - cost + costs[0] for n in given))
                for given, cost in zip(tokens, costs, strict=True)
            ]

        worths = [cost / given.mean for cost, given in zip(free, tokens, strict=True)]
        num_adjustable = sum(
            count for request, count in upcoming.emitting.items() if request.is_adjustable
        )
        return _Options(
            gains_ms=beside_plain(worths[0]),
            values_ms=beside_plain(min(worths)),
            plain_token_ms=worths[0],
            plain_ms=costs[0],
            decode_ms=free[0],
            luck_ms=LUCK_STEPS / num_adjustable * free[0],
        )

    def _tokens(self, upcoming: UpcomingStep) -> list[Estimate]:
        """Estimated tokens of all requests together, for each limit from 1 on."""
        runs: dict[Kind, list[Estimate]] = {}
        for kind in {request.kind for request in upcoming.emitting if request.kind is not None}:
            found = self._survival[kind].runs(self._max_k)
            runs[kind] = with_draftless_steps(found) if kind.emits_only_confirmed else found
        totals = []
        for limit in range(1, upcoming.longest + 1):
            low = mean = high = 0.0
            for request, count in upcoming.emitting.items():
                length = request.length(limit)
                each: Sequence[float] = (length, length, length)
                if request.kind is not None:
                    each = runs[request.kind][length - 1]
                low += count * each[0]
                mean += count * each[1]
                high += count * each[2]
            totals.append(Estimate(low, mean, high))
        return totals

    def _longest(self, upcoming: UpcomingStep) -> int:
        """The longest limit whose step replays a graph, if the step at limit 1 does: kernels
        launched one by one keep the host busy for longer than the device."""
        limit = upcoming.longest
        if self._prices.replays(self._current_shape(upcoming, 1)):
            while not self._prices.replays(self._current_shape(upcoming, limit)):
                limit -= 1
        return limit

    def _sure(self, options: _Options) -> list[int]:
        """Limits that surely gain, by more than prices are off."""
        if self._budget.left_ms < -options.luck_ms:
            return []
        least = self._prices.spread * options.plain_ms
        return [place + 1 for place, gain in enumerate(options.gains_ms) if gain.low > least]

    def _trial(self, options: _Options, upcoming: UpcomingStep, longest: int) -> int:
        """The most promising limit whose loss the trial budget can bear; 1 for none."""
        if self._budget.left_ms < self._least_loss_ms:
            return 1
        values, losses = options.values_ms[:longest], list[float]()
        promising = [place + 1 for place, value in enumerate(values) if value.high > 0]
        for limit in sorted(promising, key=lambda limit: -values[limit - 1].high):
            losses.append(self._loss(upcoming, limit))
            if losses[-1] <= self._budget.left_ms:
                return limit
        self._least_loss_ms = min(losses, default=math.inf)
        return 1

    def _loss(self, upcoming: UpcomingStep, limit: int) -> float:
        """Milliseconds lost if nothing is accepted: by masks in this step, and by what they leave
        pending in the next one."""
        with_masks, without = [
            self._prices.price_ms(self._current_shape(upcoming, length)) for length in (limit, 1)
        ]
        emitting = Counter[EmittingRequest]()
        for request, count in upcoming.emitting.items():
            pending = min(request.k, limit) if request.is_adjustable else request.pending
            emitting[request._replace(pending=pending)] += count
        after = UpcomingStep(emitting, upcoming.kv_tokens, is_packed=upcoming.is_packed)
        return with_masks - without + self._extra_ms(after, 1)

    def _extra_ms(self, upcoming: UpcomingStep, limit: int) -> float:
        """Milliseconds of the step beyond the plain one."""
        shape = self._current_shape(upcoming, limit)
        return self._prices.price_ms(shape) - self._prices.price_ms(upcoming.plain_shape())
