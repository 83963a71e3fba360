"""Checks of the KV ledger's identity: free + tree + sum(private) == pool, one owner per slot."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from sglang.srt.mem_cache.kv_ledger import LedgerReport
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle

logger = logging.getLogger(__name__)

FULL_CHECK_INTERVAL_S = 10.0  # looking at every slot of a large pool takes some 10 ms


class LedgerViolation(RuntimeError):
    """The ledger is not exact. Raised in tests only."""


class InvariantChecker:
    """Checks after every step when strict (tests), and whenever the scheduler goes idle.

    Args:
        logs_idle: log every check of an idle ledger, slot by slot.

    Attributes:
        num_violations, num_repairs: counted since the start.
    """

    def __init__(self, lifecycle: RequestLifecycle, strict: bool, logs_idle: bool = False) -> None:
        self._lifecycle = lifecycle
        self._strict = strict
        self._logs_idle = logs_idle
        self._num_steps = 0
        self._last_full_check = 0.0
        self.num_violations = 0
        self.num_repairs = 0
        self._last_report = LedgerReport(0, 0, 0)

    def report(self) -> LedgerReport:
        """Reports after a look at every slot."""
        self._last_report = self._lifecycle.ledger.check(self._lifecycle.owners())
        return self._last_report

    def summary(self) -> LedgerReport:
        """Reports missing tokens by present counts, orphans and overlaps as of the last look at
        every slot. Costs a running server nothing."""
        lifecycle = self._lifecycle
        missing = lifecycle.ledger.num_missing_tokens(lifecycle.owners())
        return replace(self._last_report, legacy_missing_tokens=missing)

    def after_step(self, transition: str) -> None:
        """Raises LedgerViolation, when strict, naming step, transition and running requests."""
        self._num_steps += 1
        if not self._strict:
            return
        report = self.report()
        if not report.is_exact:
            rids = [req.rid for req in self._lifecycle.running]
            raise LedgerViolation(f"Step {self._num_steps}, {transition}, running {rids}: {report}")

    def when_idle(self, has_time: bool = True) -> None:
        """Logs and repairs a violation in production; raises when strict.

        Compares counts every time, and slots one by one every `FULL_CHECK_INTERVAL_S` if there is
        time for that.
        """
        now = time.monotonic()
        is_due = has_time and now - self._last_full_check > FULL_CHECK_INTERVAL_S
        is_full_check_due = self._strict or self._logs_idle or is_due
        lifecycle = self._lifecycle
        if not is_full_check_due and not lifecycle.ledger.num_missing_tokens(lifecycle.owners()):
            return
        self._last_full_check = now
        report = self.report()
        if self._logs_idle:
            logger.info("Idle radix invariant summary: %s", report)
        if report.is_exact:
            return
        self.num_violations += 1
        if self._strict:
            raise LedgerViolation(f"Idle after step {self._num_steps}: {report}")
        lifecycle.ledger.repair(lifecycle.owners())
        done = "Recovered orphan" if report.orphan_token_count else "Repaired overlapping"
        logger.error("%s radix KV tokens during idle check: %s", done, report)
        self.num_repairs += 1
        self.report()
