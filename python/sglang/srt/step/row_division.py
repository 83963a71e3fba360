"""Divides the rows of a step among its requests, on the device and without a wait: the contract,
and plain torch: the CPU runtime and the oracle.

The host knows how many rows a step has. The device knows the rows that each request would feed:
first rows that it feeds in any case, then its drafts. The value of a draft is the model's
probability that it, and all drafts before it, are confirmed. The most valuable drafts of all
requests are kept. Values never rise along a request, so it is cut from its right.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from sglang.srt.step.step_sizes import MAX_DRAFTS, MAX_REQUESTS

# Values are compared as integers from 0 to this, rounded down.
HIGHEST_VALUE = 65534


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that R requests would feed, in the order of their rows in the step. All are
    contiguous.

    Attributes:
        least: [R] int64; rows that each feeds in any case.
        num_drafts: [R] int64; drafts after them.
        confidence: [N, P] float32; P(draft j is confirmed | those before it are).
        rows: [R] int64; each request's row of that table; None: request i has row i.
    """

    least: torch.Tensor
    num_drafts: torch.Tensor
    confidence: torch.Tensor
    rows: torch.Tensor | None = None

    def check(self, num_rows: int) -> None:
        """Checks shapes, not values."""
        num_reqs = len(self.least)
        assert 1 <= num_reqs <= MAX_REQUESTS, f"{num_reqs} requests"
        assert self.confidence.shape[1] <= MAX_DRAFTS, self.confidence.shape
        assert num_rows >= 0, f"{num_rows} rows"
        counts = [self.least, self.num_drafts]
        counts += [] if self.rows is None else [self.rows]
        for tensor in counts:
            assert tensor.shape == (num_reqs,), tensor.shape
            assert tensor.dtype == torch.int64, tensor.dtype
        assert self.confidence.dtype == torch.float32, self.confidence.dtype
        fits = self.rows is not None or len(self.confidence) >= num_reqs
        assert fits, "Fewer rows than requests."
        assert all(tensor.is_contiguous() for tensor in (*counts, self.confidence))


class RowDivision(Protocol):
    """Each implementation computes the same, bit for bit, and none waits for the device."""

    def divide(self, wanted: WantedRows, num_rows: int) -> torch.Tensor:
        """Keeps the `num_rows - sum(least)` most valuable drafts. If there are fewer, it keeps all,
        and the step has rows after the last request's that no request feeds.

        A draft's value is the product of its request's confidences up to its own: float32,
        multiplied from the left, times HIGHEST_VALUE, rounded down. Of equal values the draft with
        fewer before it in its request goes first, then that of the earlier request.

        Impossible inputs are bounded, so only a wrong `rows` reads or writes out of bounds. A
        confidence that is NaN or negative counts as 0, and one above 1 as 1. `num_drafts` is
        bounded by the table's width, `least` by 0 and `num_rows`. If `sum(least)` is more than
        `num_rows`, no draft is kept, and requests at the end get the remaining rows, or none.

        Returns:
            [R + 1] int64; place of each request's first row in the step, then the end of the last
            one's; never descending, and `num_rows` at most.
        """


class TorchRowDivision:
    """See `RowDivision`. It sorts; on a GPU no kernel may take that long."""

    def divide(self, wanted: WantedRows, num_rows: int) -> torch.Tensor:
        wanted.check(num_rows)
        num_reqs = len(wanted.least)
        least = wanted.least.clamp(0, num_rows)
        confidence = wanted.confidence
        confidence = confidence[:num_reqs] if wanted.rows is None else confidence[wanted.rows]
        place = torch.arange(confidence.shape[1], device=least.device)
        exists = place < wanted.num_drafts[:, None]
        room = (num_rows - least.sum()).clamp(min=0)
        kept = exists & _come_first(_order(_values(confidence), place), exists, room)
        q_starts = least.new_zeros(num_reqs + 1)
        q_starts[1:] = (least + kept.sum(1)).cumsum(0).clamp(max=num_rows)
        return q_starts


def _values(confidence: torch.Tensor) -> torch.Tensor:
    """[R, W] int64 from [R, W] float32. Not by torch.cumprod, whose order of products differs."""
    bounded = torch.where(confidence > 0, confidence.clamp(max=1), 0)
    for before, column in pairwise(bounded.unbind(1)):
        column *= before  # now the product up to its own
    return (bounded * HIGHEST_VALUE).to(torch.int64)


def _order(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns unique sort keys, [R, W] int64; lower keys win."""
    num_reqs, width = values.shape
    request = torch.arange(num_reqs, device=values.device)[:, None]
    return ((HIGHEST_VALUE - values) * width + places) * num_reqs + request


def _come_first(order: torch.Tensor, exists: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[R, W] bool; whether each is among the first `count` of those that exist."""
    absent = torch.iinfo(torch.int64).max
    found = order.masked_fill(~exists, absent).flatten().sort().values
    lasts = torch.cat((found.new_full((1,), -1), found))  # of the first 0, 1, 2, ...
    # An index without dimensions would be read by the host.
    return order <= lasts.gather(0, count.clamp(max=len(found))[None])
