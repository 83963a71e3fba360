"""How differently requests accept drafts.

Requests whose drafts are right end soon, the sooner the more drafts they are given. So they are
fewer of the steps at any time than of the text that is written, and the fewer the more is drafted:
what the requests that are there say of another number of drafts is not what it would give.

    Say a request r is given L_r(k) tokens per round with k drafts, and k are drafted now. Of all
    tokens the share f_r are of requests like r, so they are a share p_r ~ f_r / L_r(k) of the
    requests that are there. With j drafts a token takes the mean of 1 / L_r(j) over f:

        L(j) = sum_r p_r L_r(k) / sum_r p_r L_r(k) / L_r(j)

    which is the mean of L_r(j) over p for j = k alone. Written down for requests in a closed loop;
    where they come at some rate, as many tokens of each kind are to be written too.
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
    """Of each request, how often a draft is right, if those before it are, and in how many steps it
    was there.

    Args:
        num_rows: of the page table.
    """

    def __init__(self, num_rows: int) -> None:
        self._now = np.zeros((num_rows, 3))  # drafts that were tried, those that were right, steps
        self._ended = deque[NDArray[np.float64]](maxlen=MAX_ENDED)

    def admit(self, row: int) -> None:
        """A new request has got a row."""
        if self._now[row, 0]:
            self._ended.append(self._now[row].copy())
        self._now[row] = 0.0

    def observe(self, row: int, num_drafts: int, num_right: int) -> None:
        """A step verified drafts of a request."""
        tried, right, steps = self._now[row]
        tried += min(num_drafts, num_right + 1)
        scale = min(1.0, MEMORY / tried)
        self._now[row] = tried * scale, (right + num_right) * scale, steps + 1.0

    def factors(self, rows: Sequence[int], tier: int, most: int) -> list[float]:
        """What tokens per round of 0, 1, ... `most` drafts, as the requests of these rows and those
        before them gave them, are to be multiplied by, if so many as `tier` were drafted."""
        known = np.concatenate((self._now[list(rows)], *(each[None] for each in self._ended)))
        tried, right, steps = known.T
        total = tried.sum()
        if total == 0.0:
            return [1.0] * (1 + most)
        prior = (right.sum() + 1.0) / (total + 2.0)
        survival = (right + PRIOR * prior) / (tried + PRIOR)
        lengths = np.cumsum(survival[:, None] ** np.arange(1 + most), axis=1)
        now = steps * lengths[:, min(tier, most)]
        lasting = now.sum() / (now[:, None] / lengths).sum(axis=0)
        seen = (steps[:, None] * lengths).sum(axis=0) / steps.sum()
        found: list[float] = (lasting / seen).tolist()
        return found
