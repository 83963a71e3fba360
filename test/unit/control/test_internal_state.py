"""What a running server says of itself must cost it nothing."""

from __future__ import annotations

from typing import Any

import pytest

from fake_worker import FakeWorker
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.scheduling.invariants import InvariantChecker
from utils import SchedulerHarness, Setup


def running_harness() -> SchedulerHarness:
    harness = SchedulerHarness(Setup(), FakeWorker("plain", 1, Setup().max_running_requests, 0))
    harness.submit([1, 2, 3], max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        harness.step()
    return harness


def test_the_state_of_a_running_server_looks_at_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = running_harness()

    def look(*_: Any) -> None:
        raise AssertionError("every slot was looked at")

    monkeypatch.setattr(KVLedger, "check", look)
    state = harness.scheduler.control.internal_state()
    assert state["running_batch_size"] == 1
    assert state["legacy_missing_tokens"] == 0


def test_the_state_shows_a_slot_that_was_lost_just_now() -> None:
    harness = running_harness()
    harness.ledger._allocator.allocate(2)
    control, checker = harness.scheduler.control, harness.scheduler.checker
    state = control.internal_state()
    assert state["legacy_missing_tokens"] == 2
    assert state["orphan_token_count"] == 0, "as of the last look at every slot"
    checker.report()
    assert control.internal_state()["orphan_token_count"] == 2


def test_the_state_after_a_repair_is_that_of_the_repaired_ledger() -> None:
    harness = running_harness()
    harness.run()
    harness.ledger._allocator.allocate(2)
    scheduler = harness.scheduler
    checker = InvariantChecker(scheduler.lifecycle, strict=False)
    checker.when_idle()
    assert checker.num_repairs == 1
    assert checker.summary().is_exact
