"""Larger priorities run first, push smaller ones aside by a margin, and stay when the queue is
full. Nobody's tokens change by it."""

from __future__ import annotations

from fake_worker import FakeWorker, oracle
from utils import SchedulerHarness, Setup

PARAMS = {"max_new_tokens": 12, "temperature": 0.0}


def harness_of(**changes: object) -> SchedulerHarness:
    setup = Setup(**{"max_running_requests": 1, "preemption_threshold": 10, **changes})  # type: ignore[arg-type]
    return SchedulerHarness(setup, FakeWorker("plain", 4, setup.max_running_requests, seed=0))


def finishing_order(harness: SchedulerHarness) -> list[int]:
    order: list[int] = []
    while not harness.is_idle:
        harness.step()
        order += [i for i, out in harness.outputs.items() if out.num_ends and i not in order]
    return order


def test_waiting_requests_run_by_priority_then_arrival() -> None:
    harness = harness_of()
    first = harness.submit([1, 2], priority=5, **PARAMS)
    harness.step()
    others = [harness.submit([i, 3], priority=p, **PARAMS) for i, p in enumerate([0, 7, 3, 7])]
    assert finishing_order(harness) == [first, others[1], others[3], others[2], others[0]]


def test_a_much_larger_priority_pushes_a_running_request_aside() -> None:
    harness = harness_of()
    low = harness.submit([1, 2], priority=0, **PARAMS)
    for _ in range(4):
        harness.step()
    high = harness.submit([3, 4], priority=11, **PARAMS)
    assert finishing_order(harness) == [high, low]
    assert harness.outputs[low].num_retractions == 1
    for req_id, prompt in ((low, [1, 2]), (high, [3, 4])):
        assert harness.outputs[req_id].token_ids == oracle(prompt, 12)


def test_within_the_threshold_nobody_is_pushed_aside() -> None:
    harness = harness_of()
    low = harness.submit([1, 2], priority=0, **PARAMS)
    for _ in range(4):
        harness.step()
    high = harness.submit([3, 4], priority=10, **PARAMS)
    assert finishing_order(harness) == [low, high]
    assert harness.outputs[low].num_retractions == 0


def test_lack_of_memory_too_is_a_reason_to_push_aside() -> None:
    harness = harness_of(max_running_requests=4, num_pages=40)
    low = harness.submit(list(range(20)), priority=0, **PARAMS)
    for _ in range(3):
        harness.step()
    high = harness.submit(list(range(30, 50)), priority=20, **PARAMS)
    assert finishing_order(harness) == [high, low]
    assert harness.outputs[low].num_retractions == 1


def test_lack_of_memory_retracts_the_least_priority_first() -> None:
    """Whoever has the least output would be cheapest to redo, but that is the important one."""
    harness = harness_of(max_running_requests=4, num_pages=205, preemption_threshold=1000)
    for index in range(3):
        harness.submit([index, 2, 3], priority=0, max_new_tokens=60, temperature=0.0)
    for _ in range(12):
        harness.step()
    high = harness.submit([9, 8], priority=100, max_new_tokens=60, temperature=0.0)
    harness.run()
    assert harness.outputs[high].num_retractions == 0
    assert sum(outcome.num_retractions for outcome in harness.outputs.values()) > 0
    assert harness.outputs[high].token_ids == oracle([9, 8], 60)


def test_nobody_is_pushed_aside_where_that_makes_no_room() -> None:
    """The one in the way is too important to be pushed; the others would be stopped in vain."""
    harness = harness_of(max_running_requests=8, num_pages=120)
    middle = harness.submit(list(range(60)), priority=95, max_new_tokens=20, temperature=0.0)
    harness.step()
    lows = [
        harness.submit([index, 5], priority=0, max_new_tokens=10, temperature=0.0)
        for index in range(2)
    ]
    for _ in range(3):
        harness.step()
    assert len(harness.scheduler.lifecycle.running) == 3
    harness.submit(list(range(59, -1, -1)), priority=100, max_new_tokens=20, temperature=0.0)
    harness.run()
    assert [harness.outputs[req_id].num_retractions for req_id in (middle, *lows)] == [0, 0, 0]


def test_a_full_queue_never_ends_a_request_that_has_run() -> None:
    harness = harness_of(max_queued_requests=1)
    low = harness.submit([1, 2], priority=0, **PARAMS)
    for _ in range(5):
        harness.step()
    high = harness.submit([3, 4], priority=50, **PARAMS)
    harness.step()
    harness.step()
    assert harness.scheduler.lifecycle.waiting[0].req_id == low, "It was pushed aside."
    waiting = harness.submit([5, 6], priority=40, **PARAMS)
    refused = harness.submit([7, 8], priority=30, **PARAMS)
    harness.run()
    ends = {i: harness.outputs[i].finish_reason for i in (low, high, waiting, refused)}
    assert [end is not None and end.status_code for end in ends.values()] == [None, None, None, 503]
    assert harness.outputs[low].token_ids == oracle([1, 2], 12)


def test_a_full_queue_refuses_the_least_priority() -> None:
    harness = harness_of(max_queued_requests=2)
    harness.submit([1, 2], priority=0, **PARAMS)
    harness.step()
    waiting = [harness.submit([i, 3], priority=p, **PARAMS) for i, p in enumerate([1, 2, 3, 0])]
    harness.run()
    refused = []
    for req_id in waiting:
        reason = harness.outputs[req_id].finish_reason
        assert reason is not None
        if reason.status_code == 503:
            refused.append(req_id)
    assert refused == [waiting[0], waiting[3]]
