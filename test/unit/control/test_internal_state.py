"""Tests that what a running server says of itself costs it nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fake_worker import FakeWorker
from sglang.srt.control.internal_state import RECENT_STEPS, SchedulerStats
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.messages.control import (
    AbortReq,
    ContinueGenerationReq,
    FlushCacheReqInput,
    PauseGenerationReq,
)
from sglang.srt.scheduling.invariants import InvariantChecker
from sglang.srt.scheduling.request import LaunchedRow
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import BatchRequest
from utils import FakeInbox, SchedulerHarness, Setup


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


def test_batches_are_named_by_the_requests_that_they_hold() -> None:
    harness = SchedulerHarness(
        Setup(chunked_prefill_size=2, enable_overlap=True),
        FakeWorker("plain", 1, Setup().max_running_requests, 0),
    )
    short = harness.submit([1, 2], max_new_tokens=50, ignore_eos=True)
    harness.step()
    long = harness.submit([1, 2, 3, 4, 5, 6], max_new_tokens=50, ignore_eos=True)
    harness.step()
    state = harness.scheduler.control.internal_state()
    rids = {req.req_id: req.rid for req in harness.scheduler.lifecycle.running}
    assert state["cur_batch"] == [rids[long], rids[short]]
    assert state["last_batch"] == [rids[short]]
    assert state["chunked_req"] == state["chunked_req_rids"] == [rids[long]]
    harness.run()
    scheduler = harness.scheduler
    scheduler._inbox = Inbox(0)
    scheduler._wait_for_message()
    state = scheduler.control.internal_state()
    assert state["cur_batch"] is state["last_batch"] is state["chunked_req"] is None
    assert state["cur_batch_is_none"]
    assert state["last_batch_is_none"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_lines_of_an_idle_check_name_counts_and_slots(
    caplog: pytest.LogCaptureFixture, page_size: int
) -> None:
    harness = SchedulerHarness(
        Setup(page_size=page_size), FakeWorker("plain", 1, Setup().max_running_requests, 0)
    )
    ledger = harness.ledger
    checker = InvariantChecker(harness.scheduler.lifecycle, strict=False, logs_idle=True)
    lost = ledger._allocator.allocate(2)
    first = sorted(page * page_size + place for page in lost for place in range(page_size))
    with caplog.at_level("INFO"):
        checker.when_idle()
        ledger._allocator.free([ledger._allocator.free_pages[0]])
        checker.when_idle()
        checker.when_idle()
    count = 2 * page_size
    of_orphans = (
        f"legacy_missing_tokens={count}, orphan_token_count={count}, overlap_token_count=0,"
        f" orphan_sample={first}"
    )
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == [
        f"Idle radix invariant summary: {of_orphans}",
        f"Recovered orphan radix KV tokens during idle check: {of_orphans}",
    ]
    assert lines[3].startswith("Repaired overlapping radix KV tokens during idle check: ")
    assert f"overlap_token_count={page_size}, overlap_sample=[" in lines[3]
    assert lines[4:] == [
        "Idle radix invariant summary: legacy_missing_tokens=0, orphan_token_count=0,"
        " overlap_token_count=0"
    ]


class Inbox(FakeInbox):
    """Messages come after so many waits."""

    def __init__(self, num_waits: int) -> None:
        super().__init__()
        self._num_waits = num_waits

    def wait(self, timeout_s: float | None) -> bool:
        self._num_waits -= 1
        return self._num_waits < 0


@pytest.mark.parametrize(("num_waits", "num_checks"), [(0, 0), (1, 1)])
def test_a_message_that_comes_soon_does_not_wait_for_a_look_at_every_slot(
    monkeypatch: pytest.MonkeyPatch, num_waits: int, num_checks: int
) -> None:
    harness = running_harness()
    harness.run()
    scheduler = harness.scheduler
    scheduler.checker = InvariantChecker(scheduler.lifecycle, strict=False)
    scheduler._inbox = Inbox(num_waits)
    checks: list[None] = []
    check = KVLedger.check
    monkeypatch.setattr(KVLedger, "check", lambda *args: checks.append(None) or check(*args))
    scheduler._wait_for_message()
    assert len(checks) == num_checks


def test_a_slot_that_is_lost_is_found_as_soon_as_the_scheduler_is_idle() -> None:
    harness = running_harness()
    harness.run()
    scheduler = harness.scheduler
    scheduler.checker = InvariantChecker(scheduler.lifecycle, strict=False)
    scheduler._inbox = Inbox(0)
    harness.ledger._allocator.allocate(2)
    scheduler._wait_for_message()
    assert scheduler.checker.num_repairs == 1


def row(is_decode: bool) -> LaunchedRow:
    """Makes the row of a running request, whose prompt ends or which decodes."""
    [req] = running_harness().scheduler.lifecycle.running
    return LaunchedRow(req, BatchRequest(0, num_prompt_tokens=0 if is_decode else 1), max_kept=1)


def switches_after(stats: SchedulerStats, *tiers: int, is_decode: bool = True) -> dict[int, int]:
    for tier in tiers:
        stats.on_read([row(is_decode)], [1], [], tier)
    return dict(+stats.num_tier_switches)


def test_switches_are_counted_by_the_tier_that_they_lead_to() -> None:
    stats = SchedulerStats(3)
    assert stats.num_draft_steps == 3
    assert switches_after(stats, 3, 3) == {}, "as it began"
    assert switches_after(stats, 1, 1, 0, 1) == {1: 2, 0: 1}
    assert stats.num_draft_steps == 1
    assert switches_after(stats, 3) == {1: 2, 0: 1, 3: 1}
    stats.reset()
    assert switches_after(stats, 3) == {1: 2, 0: 1, 3: 1}, "since the start, also after a flush"


def test_a_step_of_trees_verifies_all_their_tokens() -> None:
    assert SchedulerStats(3).num_draft_tokens == 4
    assert SchedulerStats(5, num_tree_tokens=8).num_draft_tokens == 8
    assert SchedulerStats().num_draft_tokens == 0


def test_a_step_without_decodes_switches_nothing() -> None:
    """The drafter chose for no request of it."""
    stats = SchedulerStats(3)
    assert switches_after(stats, 0, 2, is_decode=False) == {}
    stats.on_read([], [], [], 0)
    assert (stats.num_draft_steps, stats.num_tier_switches.total()) == (3, 0)
    stats.on_read([row(False), row(True)], [1, 1], [], 2)
    assert (stats.num_draft_steps, stats.num_tier_switches.total()) == (2, 0), "the first tier"
    stats.on_read([row(False), row(True)], [1, 1], [], 1)
    assert (stats.num_draft_steps, stats.num_tier_switches.total()) == (1, 1)


def test_without_a_drafter_that_says_its_steps_there_is_no_tier() -> None:
    stats = SchedulerStats()
    assert switches_after(stats, 0, 5, 3) == {}
    assert (stats.num_draft_steps, stats.has_drafter) == (0, False)


def test_the_state_shows_the_tier_and_the_switches() -> None:
    harness = running_harness()
    control, stats = harness.scheduler.control, harness.scheduler.stats
    keys = (
        "speculative_num_steps",
        "speculative_num_draft_tokens",
        "speculative_tier_switches",
    )

    def shown() -> list[Any]:
        state = control.internal_state()
        return [state[key] for key in keys]

    assert shown() == [0, 0, {}]
    stats.has_drafter, stats.num_draft_steps = True, 3
    assert shown() == [3, 4, {}]
    switches_after(stats, 1, 0, 1)
    assert shown() == [1, 2, {"0": 1, "1": 1}]


def looking_ahead(num_rows: int = 4) -> LaunchedRow:
    """A decode row of a request that looks ahead, or of one that does not."""
    found = row(is_decode=True)
    found.req.width = StepWidth(num_rows, 1, 1)
    return found


def averages(stats: SchedulerStats) -> tuple[float | None, float | None, float | None]:
    found = stats.since_flush
    return found.accept_length, found.accept_rate, found.drafts_per_step


def test_averages_are_of_steps_of_requests_that_look_ahead_and_of_nothing_else() -> None:
    stats = SchedulerStats(3)
    rows = [looking_ahead(), looking_ahead(1), row(False), looking_ahead()]
    stats.on_read(rows, [3, 1, 1, 4], [3, 0, 3, 3], 3, [False, False, False, True])
    assert averages(stats) == (3.0, 2 / 3, 3.0)
    stats.on_read([looking_ahead()], [1], [], 0)
    assert averages(stats) == (2.0, 2 / 3, 1.5)


def test_a_flush_begins_averages_anew() -> None:
    harness = running_harness()
    harness.run()
    stats = harness.scheduler.stats
    stats.on_read([looking_ahead()], [3], [3], 3)
    assert harness.scheduler.control.internal_state()["avg_spec_accept_length"] == 3.0
    assert harness.call(FlushCacheReqInput(call_id=3)).success
    assert averages(stats) == (None, None, None)
    stats.on_read([looking_ahead()], [2], [3], 3)
    assert averages(stats) == (2.0, 1 / 3, 3.0)


def test_a_step_that_a_request_did_not_need_any_more_is_in_no_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under overlap a step may be launched for a request that the one before has ended."""
    worker = FakeWorker("verify", 4, Setup().max_running_requests, 0)
    harness = SchedulerHarness(Setup(enable_overlap=True), worker)
    accepted: list[int] = []
    num_over = 0
    on_read = SchedulerStats.on_read

    def spy(
        stats: SchedulerStats, rows: Any, lens: Any, drafts: Any, had_ended: Any, **more: Any
    ) -> None:
        nonlocal num_over
        kept = [row.is_decode and not is_over for row, is_over in zip(rows, had_ended, strict=True)]
        accepted.extend(num for num, is_kept in zip(lens, kept, strict=True) if is_kept)
        num_over += sum(had_ended)
        on_read(stats, rows, lens, drafts, had_ended=had_ended, **more)

    monkeypatch.setattr(SchedulerStats, "on_read", spy)
    for start in range(10):
        harness.submit([start, 2, 3], max_new_tokens=13, temperature=0.0)
    harness.run()
    assert num_over
    assert harness.scheduler.stats.since_flush.accept_length == sum(accepted) / len(accepted)


def test_the_accept_length_of_a_line_knows_no_flush() -> None:
    stats = SchedulerStats(3)
    stats.on_read([looking_ahead()], [4], [3], 3)
    assert stats.take_accept_length() == 4
    stats.on_read([looking_ahead()], [1], [3], 3)
    stats.reset()
    stats.on_read([looking_ahead()], [2], [3], 3)
    assert stats.take_accept_length() == 1.5
    assert stats.take_accept_length() is None


def test_the_recent_average_is_of_the_last_steps_and_of_no_time_before_a_flush() -> None:
    stats, draw = SchedulerStats(3), random.Random(2)
    decode, prompt = looking_ahead(), row(False)
    lens: list[int] = []
    for _ in range(3 * RECENT_STEPS):
        lens.append(draw.randint(1, 4))
        stats.on_read([decode], [lens[-1]], [3], 3)
        stats.on_read([prompt], [1], [], 3)
        recent = lens[-RECENT_STEPS:]
        assert stats.recent.accept_length == sum(recent) / len(recent)
        assert stats.since_flush.accept_length == sum(lens) / len(lens)
    assert (stats.drafts.num_verifications, stats.drafts.num_drafts) == (len(lens), 3 * len(lens))
    stats.reset()
    assert stats.recent.accept_length is None
    stats.on_read([decode], [2], [3], 3)
    assert stats.recent.accept_length == stats.since_flush.accept_length == 2
    assert stats.drafts.num_verifications == len(lens) + 1, "counters never fall"


def test_throughput_is_the_tokens_of_outputs_by_the_time_of_their_steps() -> None:
    harness = SchedulerHarness(
        Setup(enable_overlap=False), FakeWorker("plain", 1, Setup().max_running_requests, 0)
    )
    for _ in range(3):
        harness.submit([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    shown = []
    for _ in range(30):
        harness.step()
        harness.now += 0.25
        shown.append(harness.scheduler.control.internal_state()["last_gen_throughput"])
    assert shown[-1] == pytest.approx(3 / 0.25)
    harness.run()
    harness.now += 6
    assert harness.scheduler.control.internal_state()["last_gen_throughput"] == 0


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_a_request_says_once_how_long_it_waited_before_it_first_ran(enable_overlap: bool) -> None:
    setup = Setup(max_running_requests=1, enable_overlap=enable_overlap)
    harness = SchedulerHarness(setup, FakeWorker("plain", 1, 1, 0))
    first = harness.submit([1, 2, 3], max_new_tokens=10, ignore_eos=True)
    second = harness.submit([4, 5, 6], max_new_tokens=10, ignore_eos=True)
    third = harness.submit([7, 8], rid="third", max_new_tokens=10, ignore_eos=True)
    for _ in range(4):
        harness.step()
        harness.now += 1
    harness.call(PauseGenerationReq(call_id=5, mode="retract"))
    harness.inbox.messages.append(AbortReq(rid="third"))
    harness.step()
    harness.now += 100
    harness.call(ContinueGenerationReq(call_id=6))
    while not harness.is_idle:
        harness.step()
        harness.now += 1
    assert harness.outputs[first].num_retractions == 1
    assert harness.outputs[first].queue_times_s == [0]
    [waited_s] = harness.outputs[second].queue_times_s
    assert 104 < waited_s < 120
    assert harness.outputs[third].queue_times_s == [], "it never ran"
