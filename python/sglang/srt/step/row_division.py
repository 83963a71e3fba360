"""Divides the rows of a step among its requests, on the device and without a wait: the contract,
and plain torch: the CPU runtime and the oracle.

The host knows how many rows a step has. The device knows the rows that each request would feed:
first rows that it feeds in any case, then its drafts, then masks that predict drafts of the next
step. The value of a draft is the model's probability that it, and all drafts before it, are
confirmed. The most valuable rows of all requests are kept. Values never rise along a request, so it
is cut from its right.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from sglang.srt.step.step_sizes import MAX_DRAFTS, MAX_MASKS, MAX_REQUESTS

# Values are compared as integers from 0 to this, rounded down.
HIGHEST_VALUE = 65534


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that R requests would feed, in the order of their rows in the step. All are
    contiguous.

    Attributes:
        least: [R] int64; rows that each feeds in any case.
        num_drafts: [R] int64; drafts after them.
        num_masks: [R] int64; masks after the drafts.
        draft_confidence: [N, P] float32; P(draft j is confirmed | those before it are).
        mask_confidence: [N, K] float32; P(the prediction of mask i is confirmed | all drafts and
            the predictions of the masks before it are).
        rows: [R] int64; each request's row of the two tables; None: request i has row i.
    """

    least: torch.Tensor
    num_drafts: torch.Tensor
    num_masks: torch.Tensor
    draft_confidence: torch.Tensor
    mask_confidence: torch.Tensor
    rows: torch.Tensor | None = None

    def check(self, num_rows: int) -> None:
        """Checks shapes, not values."""
        num_reqs = len(self.least)
        assert 1 <= num_reqs <= MAX_REQUESTS, f"{num_reqs} requests"
        assert self.draft_confidence.shape[1] <= MAX_DRAFTS, self.draft_confidence.shape
        assert self.mask_confidence.shape[1] <= MAX_MASKS, self.mask_confidence.shape
        assert num_rows >= 0, f"{num_rows} rows"
        counts = [self.least, self.num_drafts, self.num_masks]
        counts += [] if self.rows is None else [self.rows]
        for tensor in counts:
            assert tensor.shape == (num_reqs,), tensor.shape
            assert tensor.dtype == torch.int64, tensor.dtype
        tables = [self.draft_confidence, self.mask_confidence]
        for tensor in tables:
            assert tensor.dtype == torch.float32, tensor.dtype
            assert self.rows is not None or len(tensor) >= num_reqs, "Fewer rows than requests."
        assert all(tensor.is_contiguous() for tensor in counts + tables)


@dataclass(frozen=True, slots=True)
class DividedRows:
    """The rows that each request feeds.

    Attributes:
        q_starts: [R + 1] int64; place of each request's first row in the step, then the end of the
            last one's; never descending, and `num_rows` at most.
        num_drafts_kept: [R] int64; counted from the first.
        num_masks_kept: [R] int64; counted from the first; 0 where not all drafts are kept.
    """

    q_starts: torch.Tensor
    num_drafts_kept: torch.Tensor
    num_masks_kept: torch.Tensor


class RowDivision(Protocol):
    """Each implementation computes the same, bit for bit, and none waits for the device."""

    def divide(self, wanted: WantedRows, num_rows: int) -> DividedRows:
        """Keeps the `num_rows - sum(least)` most valuable drafts and masks. If there are fewer, it
        keeps all, and the step has rows after `q_starts[R]` that no request feeds.

        A row's value is the product of its request's confidences up to its own, those of drafts
        first: float32, multiplied from the left, times HIGHEST_VALUE, rounded down. Of equal values
        the row with fewer drafts and masks before it in its request goes first, then that of the
        earlier request.

        Impossible inputs are bounded, so only a wrong `rows` reads or writes out of bounds. A
        confidence that is NaN or negative counts as 0, and one above 1 as 1. `num_drafts` and
        `num_masks` are bounded by the tables' widths, `least` by 0 and `num_rows`. If `sum(least)`
        is more than `num_rows`, no draft or mask is kept, and requests at the end get the remaining
        rows, or none.
        """


class TorchRowDivision:
    """See `RowDivision`. It sorts; on a GPU no kernel may take that long."""

    def divide(self, wanted: WantedRows, num_rows: int) -> DividedRows:
        wanted.check(num_rows)
        num_reqs = len(wanted.least)
        least = wanted.least.clamp(0, num_rows)
        drafts, masks = wanted.draft_confidence, wanted.mask_confidence
        if wanted.rows is None:
            drafts, masks = drafts[:num_reqs], masks[:num_reqs]
        else:
            drafts, masks = drafts[wanted.rows], masks[wanted.rows]
        max_drafts, max_masks = drafts.shape[1], masks.shape[1]
        num_drafts = wanted.num_drafts.clamp(0, max_drafts)[:, None]
        num_masks = wanted.num_masks.clamp(0, max_masks)[:, None]

        place = torch.arange(max(max_drafts, max_masks), device=least.device)
        is_draft, is_mask = place[:max_drafts] < num_drafts, place[:max_masks] < num_masks
        # Missing drafts get confidence 1, so that they do not change the products of masks.
        values = _values(torch.cat((drafts.masked_fill(~is_draft, 1), masks), 1))
        offsets = torch.cat(
            (place[:max_drafts].expand(num_reqs, -1), num_drafts + place[:max_masks]), 1
        )
        exists = torch.cat((is_draft, is_mask), 1)
        room = (num_rows - least.sum()).clamp(min=0)
        kept = exists & _come_first(_order(values, offsets), exists, room)

        num_drafts_kept = kept[:, :max_drafts].sum(1)
        num_masks_kept = kept[:, max_drafts:].sum(1)
        q_starts = least.new_zeros(num_reqs + 1)
        q_starts[1:] = (least + num_drafts_kept + num_masks_kept).cumsum(0).clamp(max=num_rows)
        return DividedRows(q_starts, num_drafts_kept, num_masks_kept)


def _values(confidence: torch.Tensor) -> torch.Tensor:
    """[R, W] int64 from [R, W] float32. Not by torch.cumprod, whose order of products differs."""
    bounded = torch.where(confidence > 0, confidence.clamp(max=1), 0)
    for before, column in pairwise(bounded.unbind(1)):
        column *= before  # now the product up to its own
    return (bounded * HIGHEST_VALUE).to(torch.int64)


def _order(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns unique sort keys, [R, W] int64; lower keys win."""
    num_reqs, width = values.shape
    request = torch.arange(num_reqs, device=values.device)[:, None]
    return ((HIGHEST_VALUE - values) * width + offsets) * num_reqs + request


def _come_first(order: torch.Tensor, exists: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[R, W] bool; whether each is among the first `count` of those that exist."""
    absent = torch.iinfo(torch.int64).max
    found = order.masked_fill(~exists, absent).flatten().sort().values
    lasts = torch.cat((found.new_full((1,), -1), found))  # of the first 0, 1, 2, ...
    # An index without dimensions would be read by the host.
    return order <= lasts.gather(0, count.clamp(max=len(found))[None])
