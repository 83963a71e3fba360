"""How far each request looks ahead: parameters on the device, bounds on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.base_worker import NewRow, ScheduleBatch
from sglang.srt.device_copies import to_device
from sglang.srt.model_executor.step_ops import StepCounts


@dataclass(frozen=True, slots=True)
class StepLengths:
    """What a step feeds and reads, request by request; known before the step before it is read.

    Attributes:
        counts: what of it the device must know. A request without look-ahead is verified, too.
        max_accepted: tokens that can be accepted.
        looks_ahead: whether the request wants to predict more than one token.
        max_pending: tokens that can be pending, 1 where a prompt is fed.
        is_uncertain: it does, and how many are accepted is not known beforehand.
    """

    counts: StepCounts
    max_accepted: list[int]
    looks_ahead: list[bool]
    max_pending: list[int]
    is_uncertain: list[bool]

    @property
    def is_plain(self) -> bool:
        """Whether nobody looks ahead or has more than one pending token."""
        return max(self.counts.num_predicted) <= 1 and max(self.max_pending) == 1


class LookaheadRows:
    """One entry per row of the request-to-token table.

    Attributes:
        thresholds: [N] float32; tau, 0 for static k.
        max_predicted: N host integers; the request's k.
        host_thresholds: `thresholds` on the host.
        is_lossless: N host flags; verified, or without look-ahead.
    """

    def __init__(self, num_rows: int, device: str) -> None:
        self._device = device
        self.thresholds = torch.zeros(num_rows, device=device)
        self.max_predicted = [1] * num_rows
        self.host_thresholds = [0.0] * num_rows
        self.is_lossless = [True] * num_rows
        self._pending_bounds = [1] * num_rows

    def initialize(self, new_rows: list[NewRow]) -> None:
        """Sets the state of requests that have just got a row."""
        if not new_rows:
            return
        for new in new_rows:
            params = new.params
            self.max_predicted[new.row] = params.num_predicted
            self.host_thresholds[new.row] = params.mtp_threshold
            self.is_lossless[new.row] = params.mtp_verify or not params.mtp_enabled
        places = [new.row for new in new_rows]
        rows = to_device(places, self._device)
        thresholds = [self.host_thresholds[row] for row in places]
        self.thresholds[rows] = to_device(thresholds, self._device)

    def is_static(self, row: int) -> bool:
        """Whether each step of its request accepts as many tokens as it predicts."""
        is_taken = not self.is_lossless[row] and self.host_thresholds[row] == 0
        return is_taken or self.max_predicted[row] == 1

    def plan(
        self, batch: ScheduleBatch, limits: list[int], longest_pending: int | None
    ) -> StepLengths:
        """Lengths of the next step.

        Args:
            limits: R tokens that may be predicted, at most.
            longest_pending: most pending tokens that a request has, where that is known.
        """
        counts = StepCounts([], [], [], [])
        lengths = StepLengths(counts, [], [], [], [])
        for i, row in enumerate(batch.rows):
            num_host = batch.num_host_tokens[i]
            k = min(self.max_predicted[row], limits[i]) if batch.emits[i] else 0
            bound = 1 if num_host else self._pending_bounds[row]
            if longest_pending is not None:
                bound = min(bound, longest_pending)
            q_len = (num_host or bound) + max(k - 1, 0)
            reads_pending = self.is_lossless[row] and not num_host
            counts.q_lens.append(q_len)
            lengths.max_pending.append(bound)
            counts.num_predicted.append(k)
            counts.num_read.append(q_len if reads_pending else k)
            lengths.max_accepted.append(bound if self.is_lossless[row] else k)
            counts.is_verified.append(self.is_lossless[row])
            looks_ahead = batch.emits[i] and self.max_predicted[row] > 1
            lengths.looks_ahead.append(looks_ahead)
            lengths.is_uncertain.append(looks_ahead and not self.is_static(row))
            if k:
                self._pending_bounds[row] = k
        return lengths
