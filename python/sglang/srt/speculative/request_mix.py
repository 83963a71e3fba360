"""How many tokens requests are given per round of any number of drafts, in the long run.

Drafts are right in stretches, and more often in some requests than in others. Rounds of few drafts
meet a stretch several times where one of many drafts would have passed it at once, and requests
whose drafts are right end soon. So how often drafts were right in the rounds that were run does not
say what rounds of another number of drafts would give.

    A token is predictable if a draft of it is right, given that all before it are. Behind a
    predictable token the next one is predictable with the chance s (the stretch goes on), behind
    another one with the chance b (a stretch begins). A round of d drafts confirms what is left of a
    stretch, d tokens at most, and gives the model's own token behind these. That one is not
    predictable if fewer than d were confirmed; if all were, the next draft is right with the chance

        c = s^2 + (1 - s) b

    The share q of rounds behind such a full one follows from b s^(d - 1) and c s^(d - 1), the
    chances that a round is full. So each round gives a request

        L(d) = 1 + (1 + s + ... + s^(d - 1)) ((1 - q) b + q c)

    tokens. Of all tokens let the share f_r be of requests like r. A token takes the mean of
    1 / L_r(d) over f, so in the long run rounds give 1 / sum_r (f_r / L_r(d)) tokens, whatever was
    drafted while f was seen. Written down for requests in a closed loop; where they come at some
    rate, as many tokens of each kind are to be written too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEMORY = 256.0  # drafts of a request behind tokens of a kind that are remembered
PRIOR = 3.0  # drafts that the others count as in what is thought of one request
# Requests that have ended and are remembered; drafts behind tokens of a kind that are remembered of
# all that have ended together.
MAX_ENDED, PAST = 64, 1024.0
WINDOW = 4096.0  # tokens, of all requests together, whose shares say which requests there are
# Before anything is known a draft is right with this chance, which counts as so many drafts.
FIRST_CHANCE, FIRST_TRIALS = 0.6, 2.0
MOST_CHANCE = 0.995  # a stretch ends some time
# If the last drafts, so many or those of so many steps, are right so many standard deviations more
# or less often than was thought, text has changed: all but a few of each request are forgotten.
RECENT_TRIALS, RECENT_STEPS, CHANGE, KEPT = 128.0, 2.0, 3.5, 2.0

# Columns of what is known of a request: drafts tried behind predictable tokens, and those right;
# the same behind other tokens; tokens given.
STAYED_TRIED, STAYED, BEGUN_TRIED, BEGUN, TOKENS = range(5)
# What the last token of a request was.
UNPREDICTABLE, BEHIND_FULL, UNKNOWN = range(3)


class _Chances(NamedTuple):
    """Of R requests [R]: that a stretch goes on, and that one begins."""

    stay: Floats
    begin: Floats


class RequestMix:
    """Of each request, how often stretches of predictable tokens go on and begin.

    Args:
        num_rows: of the page table.
    """

    def __init__(self, num_rows: int) -> None:
        # Of the request of each row; then of those that have ended, of which the oldest one makes
        # room; then of nobody, with one token, so that there is one.
        self._known = np.zeros((num_rows + MAX_ENDED + 1, 5))
        self._known[-1, TOKENS] = 1.0
        self._others = np.arange(num_rows, num_rows + MAX_ENDED + 1)
        self._oldest = 0
        self._past = np.zeros((1, 5))  # of all that have ended
        self._last = np.full(num_rows, UNKNOWN)
        # Right drafts beyond those expected among the last ones, and the variance of that.
        self._surprise = self._variance = 0.0

    def admit(self, row: int) -> None:
        """A new request has got a row."""
        known = self._known[row]
        if known[STAYED_TRIED] + known[BEGUN_TRIED]:
            self._known[self._others[self._oldest]] = known
            self._oldest = (self._oldest + 1) % MAX_ENDED
            self._past += known
            _forget(self._past, PAST)
        known[:] = 0.0
        self._last[row] = UNKNOWN

    def observe(
        self,
        rows: Sequence[int],
        num_drafts: Sequence[int],
        num_right: Sequence[int],
        num_tokens: Sequence[int],
        num_fed: Sequence[int] | None = None,
    ) -> None:
        """Hears a step.

        Args:
            rows: R, of its requests, each once.
            num_drafts: R counts of drafts that each had; 0: none.
            num_right: R counts of those that were right.
            num_tokens: R counts of tokens that each was given.
            num_fed: R counts of drafts that the step fed; of further ones it is a guess whether
                they were right. None: all.
        """
        index, counts, right = np.array(rows), np.array(num_drafts), np.array(num_right)
        self._known[:-1, TOKENS] *= max(0.0, 1 - sum(num_tokens) / WINDOW)
        self._known[index, TOKENS] += num_tokens
        has_drafts = counts > 0
        drafted, counts, right = index[has_drafts], counts[has_drafts], right[has_drafts]
        if len(drafted):
            self._learn(
                drafted,
                counts,
                right,
                self._chances(self._known[index].sum(axis=0), self._known[drafted]),
            )
        self._last[index] = UNKNOWN
        fed = counts if num_fed is None else np.array(num_fed)[has_drafts]
        last = np.where(np.array(num_tokens)[has_drafts] - 1 == fed, BEHIND_FULL, UNPREDICTABLE)
        self._last[drafted] = np.where(fed == 0, UNKNOWN, last)

    def _learn(
        self, rows: NDArray[np.int64], counts: Floats, right: Floats, chances: _Chances
    ) -> None:
        """From drafts of requests, counts [R] and right [R] of each. The draft behind a token of
        which it is not known whether it was predictable counts for both kinds, in part."""
        stay, begin = chances
        predictable = np.choose(self._last[rows], (0.0 * stay, stay, begin / (1 - stay + begin)))
        first = predictable * stay + (1 - predictable) * begin
        is_right = right > 0
        likelihood = np.where(is_right, stay / first, (1 - stay) / (1 - first))
        share = predictable * likelihood
        more, more_right = np.minimum(counts - 1, right), np.maximum(right - 1, 0)
        known = self._known[rows]
        # The chances are known from few drafts: they are uncertain, too.
        doubt = 1 + 1 / (known[:, BEGUN_TRIED] + PRIOR)
        more_doubt = 1 + more / (known[:, STAYED_TRIED] + PRIOR)
        variance = first * (1 - first) * doubt + more * stay * (1 - stay) * more_doubt
        known[:, STAYED_TRIED] += share + more
        known[:, STAYED] += share * is_right + more_right
        known[:, BEGUN_TRIED] += 1 - share
        known[:, BEGUN] += (1 - share) * is_right
        _forget(known, MEMORY)
        self._known[rows] = known
        self._notice_change(
            num_trials=float((1 + more).sum()),
            surprise=float((is_right - first + more_right - more * stay).sum()),
            variance=float(variance.sum()),
        )

    def _notice_change(self, num_trials: float, surprise: float, variance: float) -> None:
        """Forgets what was before text changed, if it seems that it did."""
        self._surprise += surprise
        self._variance += variance
        kept = 1 - num_trials / max(RECENT_TRIALS, RECENT_STEPS * num_trials)
        if self._surprise**2 > CHANGE**2 * max(self._variance, 1.0):
            kept = 0.0
            self._known[self._others[:-1]] = 0.0
            self._past[:] = 0.0
            _forget(self._known, KEPT)
        self._surprise *= kept
        self._variance *= kept * kept

    def lengths(self, rows: Sequence[int], most: int) -> list[float]:
        """Tokens that each round gives a request in the long run, with 0, 1, ... `most` drafts, if
        requests are as those of these rows and those before them."""
        index = np.array(rows)
        known = self._known[np.concatenate((index, self._others))]
        total = known[: len(index)].sum(axis=0)
        stay, begin = (each[:, None] for each in self._chances(total, known))
        ends = 1 - stay
        powers = stay ** np.arange(1 + most)
        stretch = (1 - powers) / ends
        behind_full = stay * stay + ends * begin
        is_last = powers[:, np.maximum(np.arange(most + 1) - 1, 0)]
        full = begin * is_last / (1 - (behind_full - begin) * is_last)
        lengths = 1 + stretch * (begin + full * (behind_full - begin))
        tokens = known[:, TOKENS, None]
        found: list[float] = (tokens.sum() / (tokens / lengths).sum(axis=0)).tolist()
        return found

    def _chances(self, running: Floats, known: Floats) -> _Chances:
        """Of each request of `known` [K, 5]; where little is known of one, those of all: of the
        requests that run, `running` [5] in all, and of those before them."""
        total = running + self._past[0]
        begin = _share(total[BEGUN], total[BEGUN_TRIED], FIRST_CHANCE, FIRST_TRIALS)
        stay = _share(total[STAYED], total[STAYED_TRIED], begin, FIRST_TRIALS)
        stays = _share(known[:, STAYED], known[:, STAYED_TRIED], stay, PRIOR)
        begins = _share(known[:, BEGUN], known[:, BEGUN_TRIED], begin, PRIOR)
        return _Chances(np.minimum(stays, MOST_CHANCE), np.minimum(begins, MOST_CHANCE))


def _forget(known: Floats, most: float) -> None:
    """Leaves so many drafts behind tokens of either kind; known [K, 5] is changed."""
    for tried in (STAYED_TRIED, BEGUN_TRIED):
        known[:, tried : tried + 2] *= (most / np.maximum(known[:, tried], most))[:, None]


def _share(right: Floats, tried: Floats, prior: Floats | float, trials: float) -> Floats:
    """How many of those tried are right, with a prior that counts as so many trials."""
    return (right + trials * prior) / (tried + trials)
