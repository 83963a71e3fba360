"""The answer of `confirm_drafts` for each request."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ConfirmedDrafts(NamedTuple):
    """The confirmed drafts of R requests with up to M pending rows each.

    Attributes:
        num_confirmed: [R] int64; drafts confirmed. Row 0 is kept too, so 1 more is kept.
        path: [R, M] int32; index within the request of the k-th kept row, in ascending order from
            path[i, 0] = 0; -1 after the last.
        next_token: [R] int64; the target of the last kept row.

    A request without pending rows has 0, only -1, and 0.
    """

    num_confirmed: torch.Tensor
    path: torch.Tensor
    next_token: torch.Tensor
