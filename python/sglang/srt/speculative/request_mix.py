"""How differently requests accept drafts.

Requests whose drafts are right end soon, the sooner the more drafts they are given. So they are
fewer of the steps at any time than of the text that is written, and the fewer the more is drafted:
what the requests that are there say of another number of drafts is not what it would give.

    Say a request r is given L_r(k) tokens per round with k drafts. Of all tokens the share f_r are
    of requests like r. With j drafts a token takes the mean of 1 / L_r(j) over f, so rounds give

        L(j) = sum_r f_r / sum_r f_r / L_r(j)

    tokens in the long run, whatever was drafted while f was seen. Written down for requests in a
    closed loop; where they come at some rate, as many tokens of each kind are to be written too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 48.0  # drafts of a request that are remembered, since its text changes
PRIOR = 6.0  # drafts that the others count as in what is thought of one
MAX_ENDED = 32  # requests that have ended and are remembered


class RequestMix:
    """Of each request, how often a draft is right, if those before it are, in how many steps it had
    drafts, and how many tokens it was given.

    Args:
        num_rows: of the page table.
    """

    def __init__(self, num_rows: int) -> None:
        self._now = np.zeros((num_rows, 4))  # drafts tried, those right, steps, tokens
        self._ended = deque[NDArray[np.float64]](maxlen=MAX_ENDED)

    def admit(self, row: int) -> None:
        """A new request has got a row."""
        if self._now[row, 0]:
            self._ended.append(self._now[row].copy())
        self._now[row] = 0.0

    def observe(
        self,
        rows: Sequence[int],
        num_drafts: Sequence[int],
        num_right: Sequence[int],
        num_tokens: Sequence[int],
    ) -> None:
        """Hears a step.

        Args:
            rows: R, of its requests, each once.
            num_drafts: R counts of drafts that each had; 0: none.
            num_right: R counts of those that were right.
            num_tokens: R counts of tokens that each was given.
        """
        index = np.array(rows)
        counts, right = np.array(num_drafts), np.array(num_right)
        tried = np.minimum(counts, right + 1)
        self._now[index] += np.stack((tried, right, counts > 0, num_tokens), axis=1)
        scale = np.minimum(1.0, MEMORY / np.maximum(self._now[index, 0], 1.0))
        self._now[index, :2] *= scale[:, None]

    def factors(self, rows: Sequence[int], most: int) -> list[float]:
        """What tokens per round of 0, 1, ... `most` drafts, as the requests of these rows and those
        before them gave them, are to be multiplied by to be those of the long run."""
        known = np.concatenate((self._now[list(rows)], *(each[None] for each in self._ended)))
        tried, right, steps, tokens = known.T
        total = tried.sum()
        if total == 0.0:
            return [1.0] * (1 + most)
        prior = (right.sum() + 1.0) / (total + 2.0)
        survival = (right + PRIOR * prior) / (tried + PRIOR)
        lengths = np.cumsum(survival[:, None] ** np.arange(1 + most), axis=1)
        lasting = tokens.sum() / (tokens[:, None] / lengths).sum(axis=0)
        seen = (steps[:, None] * lengths).sum(axis=0) / steps.sum()
        found: list[float] = (lasting / seen).tolist()
        return found
