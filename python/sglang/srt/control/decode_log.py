"""The scheduler's line of state in the log, while requests decode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sglang.srt.control.internal_state import SchedulerStats
from sglang.srt.observability.log_format import FIGURES
from sglang.srt.scheduling.batch_result_processor import BatchResultProcessor
from sglang.srt.scheduling.request import LaunchedRow
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


class DecodeLog:
    """Writes one line every few decode steps, those in which a request decodes.

    Args:
        processor, stats: both see each step before this log does.
        interval: steps between two lines; 0 for no lines, None for a line in `PERIOD_S` of work.
        clock: seconds.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        processor: BatchResultProcessor,
        stats: SchedulerStats,
        interval: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._processor = processor
        self._stats = stats
        self._interval = interval
        self._clock = clock
        self._last_read_s: float | None = None
        self._num_generated = 0
        self._begin()

    def after_step(self, rows: Sequence[LaunchedRow]) -> None:
        """Counts a step that was read, and writes a line if one is due."""
        now_s, num_generated = self._clock(), self._processor.num_generated
        if self._last_read_s is not None:
            self._busy_s += now_s - self._last_read_s
            self._num_new += num_generated - self._num_generated
        self._last_read_s, self._num_generated = now_s, num_generated
        if not any(row.is_decode for row in rows):
            return
        self._num_steps += 1
        if self._is_due:
            logger.info("%s", self._line(), extra=FIGURES)
            self._begin()

    def on_idle(self) -> None:
        """Keeps the idle time out of the rate: the time until the next step has been read and its
        tokens do not count."""
        self._last_read_s = None

    @property
    def _is_due(self) -> bool:
        if self._interval is None:
            return self._busy_s >= PERIOD_S
        return 0 < self._interval <= self._num_steps

    def _begin(self) -> None:
        self._num_steps = self._num_new = 0
        self._busy_s = 0.0
        self._stats.take_accept_length()

    def _line(self) -> str:
        lifecycle, ledger = self._lifecycle, self._lifecycle.ledger
        num_used = ledger.num_pool_tokens - ledger.num_free_tokens - ledger.num_tree_tokens
        parts = [
            f"{len(lifecycle.running)} running",
            f"{len(lifecycle.waiting)} queued",
            f"KV {num_used / max(ledger.num_pool_tokens, 1):.0%} ({num_used} tokens)",
        ]
        if self._busy_s:
            parts.append(f"{self._num_new / self._busy_s:.1f} tokens/s")
        accept_length = self._stats.take_accept_length()
        if accept_length is not None:
            parts.append(f"accept length {accept_length:.2f}")
        if self._stats.has_drafter:
            parts.append(f"tier {self._stats.num_draft_steps}")
        return f"Decode: {', '.join(parts)}."
