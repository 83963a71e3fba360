"""Which drafts of a step are confirmed: those that the target's own tokens equal, or, for
benchmarks, so many."""

from __future__ import annotations

from typing import Protocol

import torch

from sgl_kernel import ConfirmedDrafts
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.step.step_ops import READ_START, RowLayout


class Confirm(Protocol):
    """Decides on the drafts of a step, on the device, and may not wait for it."""

    def __call__(
        self, layout: RowLayout, targets: torch.Tensor, max_rows: int
    ) -> tuple[ConfirmedDrafts, torch.Tensor]:
        """
        Args:
            layout: with look-ahead.
            targets: [S] int64; the target's own token after each row read.
            max_rows: at least the pending rows of any request, and the tokens that it may accept.

        Returns:
            The drafts confirmed, and [S] int64: the token to emit behind each row read.
        """


class ConfirmEqual:
    """Lossless: a draft is confirmed if the target, reading the row before it, gives that token."""

    def __init__(self, device: torch.device) -> None:
        self._ops = sampling_ops(device)

    def __call__(
        self, layout: RowLayout, targets: torch.Tensor, max_rows: int
    ) -> tuple[ConfirmedDrafts, torch.Tensor]:
        lookahead = layout.lookahead
        assert lookahead is not None, "A step with look-ahead is laid out as one."
        confirmed = self._ops.confirm_drafts(
            layout.input_ids,
            targets,
            lookahead.parents,
            lookahead.q_starts,
            lookahead.num_pending,
            max_rows,
            layout.per_request[READ_START],
        )
        return confirmed, targets


class ConfirmSoMany:
    """For benchmarks alone, `SGLANG_SIMULATE_ACC_LEN`: as many drafts of each chain are taken for
    right as give the wished mean, whatever they are, and are emitted. Outputs mean nothing.

    Counts are the floor or the ceiling of the mean, in turn over the requests of a step and over
    the steps of a request, or all drafts where there are fewer.

    Args:
        mean: tokens per request and step, the target's own one counted; at least 1.
    """

    def __init__(self, mean: float) -> None:
        self._num_drafts = mean - 1
        self._turn = 0

    def __call__(
        self, layout: RowLayout, targets: torch.Tensor, max_rows: int
    ) -> tuple[ConfirmedDrafts, torch.Tensor]:
        lookahead = layout.lookahead
        assert lookahead is not None, "A step with look-ahead is laid out as one."
        assert lookahead.parents is None, "Chains alone."
        num_pending, reads = lookahead.num_pending, layout.reads
        device, num_reqs = num_pending.device, len(num_pending)
        turns = torch.arange(num_reqs + 1, dtype=torch.float64, device=device) + self._turn
        self._turn += 1
        wished = (turns * self._num_drafts).floor().diff().to(torch.int64)
        count = torch.minimum(wished, num_pending - 1).clamp(max=max_rows - 1)
        offsets = torch.arange(max_rows, device=device)
        path = torch.where(offsets <= count[:, None], offsets, -1).to(torch.int32)
        following = layout.input_ids[(reads.index + 1).clamp(max=len(layout.input_ids) - 1)]
        emitted = torch.where(reads.offset < count[reads.request], following, targets)
        last = (layout.per_request[READ_START] + count).clamp(max=len(emitted) - 1)
        return ConfirmedDrafts(count, path, emitted[last]), emitted
