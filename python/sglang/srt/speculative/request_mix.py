"""Estimates how many tokens requests are given per round of any number of drafts, in the long run.

Drafts are right in stretches, and more often in some requests than in others. Rounds of few drafts
meet a stretch several times where one of many drafts would have passed it at once, and requests
whose drafts are right end soon. So how often drafts were right in the rounds that were run does not
say what rounds of another number of drafts would give.

    A token is predictable if a draft of it is right, given that all before it are. After a
    predictable token the next one is predictable with the chance s (the stretch goes on), after
    another one with the chance b (a stretch begins). A round of d drafts confirms what is left of a
    stretch, d tokens at most, and gives the model's own token after these. That one is not
    predictable if fewer than d were confirmed; if all were, the next draft is right with the chance

        c = s^2 + (1 - s) b

    The share q of rounds after such a full one follows from b s^(d - 1) and c s^(d - 1), the
    chances that a round is full. So each round gives a request

        L(d) = 1 + (1 + s + ... + s^(d - 1)) ((1 - q) b + q c)

    tokens. Of all tokens let the share f_r be of requests like r. A token takes the mean of
    1 / L_r(d) over f, so in the long run rounds give 1 / sum_r (f_r / L_r(d)) tokens, whatever was
    drafted while f was seen. Written down for requests in a closed loop; where they come at some
    rate, as many tokens of each kind are to be written too.

    The last round of a request gives tokens beyond its end. X tokens per round go

        o(d) = E[X^2] / (2 L(d)) - 1 / 2

    tokens beyond an end that lies anywhere (renewal theory), where from the chances above

        E[X^2] = 1 + (3 + 5 s + ... + (2 d + 1) s^(d - 1)) ((1 - q) b + q c)

    And where z rounds are launched before the one before them is read, the request is still in
    these, unless its end was sure: unless one token was left before its last round, which has the
    chance 1 / L(d). So rounds give N tokens of a request in

        N / L(d) + o(d) / L(d) + z (1 - 1 / L(d))

    rounds. More drafts gain less where requests are short. What is said of z holds for requests
    that end by their number of tokens; of those that end by a token no one is sure, whatever the
    number of drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEMORY = 256.0  # drafts of a request after tokens of a kind that are remembered
PRIOR = 3.0  # drafts that the others count as in what is thought of one request
# Requests that have ended and are remembered; drafts after tokens of a kind that are remembered of
# all that have ended together.
MAX_ENDED, PAST = 64, 1024.0
# Tokens, of all requests together, whose shares say which requests there are, or those of recent
# steps if these are fewer: with a few requests at a time it would take long to forget others.
WINDOW, WINDOW_STEPS = 4096.0, 128.0
# Before anything is known a draft is right with this chance, which counts as FIRST_TRIALS drafts.
FIRST_CHANCE, FIRST_TRIALS = 0.6, 2.0
MOST_CHANCE = 0.995  # a stretch ends some time
# When accuracy over the last RECENT_TRIALS drafts or RECENT_STEPS steps is CHANGE standard
# deviations from the prediction, text has changed: all but KEPT drafts of each are forgotten.
RECENT_TRIALS, RECENT_STEPS, CHANGE, KEPT = 128.0, 2.0, 3.5, 2.0

# Columns of what is known of a request: drafts tried after predictable tokens and after other
# ones; of both those that were right; tokens given.
STAYED_TRIED, BEGUN_TRIED, STAYED, BEGUN, TOKENS = range(5)
TRIED, RIGHT = slice(STAYED_TRIED, STAYED), slice(STAYED, TOKENS)
# What the last token of a request was.
UNPREDICTABLE, BEHIND_FULL, UNKNOWN = range(3)


class RequestMix:
    """Estimates, for each request, how often stretches of predictable tokens go on and begin.

    Args:
        num_rows: of the page table.
    """

    def __init__(self, num_rows: int) -> None:
        # Of the request of each row; then of those that have ended, of which the oldest one makes
        # room; then of no request, with one token, so that there is one.
        self._known = np.zeros((num_rows + MAX_ENDED + 1, 5))
        self._known[-1, TOKENS] = 1.0
        self._others = np.arange(num_rows, num_rows + MAX_ENDED + 1)
        self._oldest = 0
        self._past = np.zeros(5)  # of all that have ended
        self._last = np.full(num_rows, UNKNOWN)
        # Right drafts beyond those expected among the last ones, and the variance of that.
        self._surprise = self._variance = 0.0

    def admit(self, row: int) -> None:
        """A new request has got a row."""
        known = self._known[row]
        if known[TRIED].any():
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
        index, counts, given = np.array(rows), np.array(num_drafts), np.array(num_tokens)
        tokens = self._known[:, TOKENS]
        tokens[:-1] *= max(0.0, 1 - max(given.sum() / WINDOW, 1 / WINDOW_STEPS))
        tokens[index] += given
        last = np.full(len(index), UNKNOWN)
        if counts.any():
            fed = counts if num_fed is None else np.array(num_fed)
            last = np.where(given - 1 == fed, BEHIND_FULL, UNPREDICTABLE)
            last[fed == 0] = UNKNOWN
            means, drafted = self._means(self._known[index].sum(axis=0)), counts > 0
            right = np.array(num_right)[drafted]
            self._learn(index[drafted], counts[drafted], right, means)
        self._last[index] = last

    def _learn(self, rows: NDArray[np.int64], counts: Floats, right: Floats, means: Floats) -> None:
        """From drafts of requests, counts [R] and right [R] of each; means: see `_means`. The draft
        after a token of which it is not known whether it was predictable counts for both kinds, in
        part."""
        known, last = self._known[rows], self._last[rows]
        chances, doubts = _chances(known, means)
        stay, begin = chances.T
        predictable = np.where(last == BEHIND_FULL, stay, 0.0)
        if (is_unknown := last == UNKNOWN).any():
            predictable[is_unknown] = (begin / (1 - stay + begin))[is_unknown]
        stays = predictable * stay
        first = stays + (1 - predictable) * begin
        is_right, wrong = right > 0, 1 - first
        share = np.where(is_right, stays / first, (predictable - stays) / wrong)
        more, more_right = np.minimum(counts - 1, right), np.maximum(right - 1, 0)
        # The chances are known from few drafts: they are uncertain, too.
        variance = (first * wrong) @ (1 + doubts[:, BEGUN_TRIED])
        variance += (more * stay * (1 - stay)) @ (1 + more * doubts[:, STAYED_TRIED])
        num_right = is_right.sum() + more_right.sum()
        right_share = share * is_right
        known[:, STAYED_TRIED] += share + more
        known[:, BEGUN_TRIED] += 1 - share
        known[:, STAYED] += right_share + more_right
        known[:, BEGUN] += is_right - right_share
        _forget(known, MEMORY)
        self._known[rows] = known
        self._notice_change(
            num_trials=float(len(known) + more.sum()),
            surprise=float(num_right - first.sum() - more @ stay),
            variance=float(variance),
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

    def lengths(
        self, rows: Sequence[int], most: int, num_new: float = math.inf, num_late: int = 0
    ) -> list[float]:
        """Tokens that each round gives a request in the long run, with 0, 1, ... `most` drafts, if
        requests are as those of these rows and those before them.

        Args:
            num_new: tokens of a request that rounds give. If they are fewer than a round may give,
                they count as that many: the end then lies where no mean says.
            num_late: rounds that are launched before the one before them is read.
        """
        num_new = max(num_new, 1.0 + most)
        index = np.array(rows)
        known = self._known[np.concatenate((index, self._others))]
        chances, _ = _chances(known, self._means(known[: len(index)].sum(axis=0)))
        stay, begin = chances.T[:, :, None]
        powers = stay ** np.arange(1 + most)
        stretch, squares = (_sums_before(terms) for terms in (powers, powers * _odd(most)))
        more_full = stay * stay - stay * begin  # c - b
        is_last = powers[:, _before(most)]
        full = begin * is_last / (1 - more_full * is_last)
        first = begin + full * more_full
        lengths = 1 + stretch * first
        beyond = (1 + squares * first) / (2 * lengths) - 0.5
        late = num_late * (1 - 1 / lengths)
        rounds = (1 + beyond / num_new) / lengths + late / num_new  # of a token
        tokens = known[:, TOKENS]
        found: list[float] = np.maximum.accumulate(tokens.sum() / (tokens @ rounds)).tolist()
        return found  # more drafts never give less, though the mean of ends may say so

    def _means(self, running: Floats) -> Floats:
        """[2]; the chances of all requests, of those that run (in all `running` [5]) and of those
        before them: that a stretch goes on, and that one begins."""
        stayed_tried, begun_tried, stayed, begun, _ = (running + self._past).tolist()
        begin = (begun + FIRST_TRIALS * FIRST_CHANCE) / (begun_tried + FIRST_TRIALS)
        return np.array(((stayed + FIRST_TRIALS * begin) / (stayed_tried + FIRST_TRIALS), begin))


def _chances(known: Floats, means: Floats) -> tuple[Floats, Floats]:
    """[K, 2] of each request of `known` [K, 5]: the chances that a stretch goes on, and that one
    begins, those of all where little is known of it; and the inverse of how many drafts each is
    known from."""
    doubts = 1 / (known[:, TRIED] + PRIOR)
    return np.minimum((known[:, RIGHT] + PRIOR * means) * doubts, MOST_CHANCE), doubts


def _sums_before(terms: Floats) -> Floats:
    """Returns for each of terms [K, 1 + most] the sum of those before it."""
    sums = np.zeros_like(terms)
    np.cumsum(terms[:, :-1], axis=1, out=sums[:, 1:])
    return sums


@cache
def _odd(most: int) -> NDArray[np.int64]:
    """3, 5, ... 2 `most` + 3."""
    return 2 * np.arange(most + 1) + 3


@cache
def _before(most: int) -> NDArray[np.int64]:
    """0, 0, 1, ... `most` - 1."""
    return np.maximum(np.arange(most + 1) - 1, 0)


def _forget(known: Floats, most: float) -> None:
    """Leaves a number of drafts after tokens of either kind; known [..., 5] is changed."""
    kept = most / np.maximum(known[..., TRIED], most)
    known[..., TRIED] *= kept
    known[..., RIGHT] *= kept
