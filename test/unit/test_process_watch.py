"""Stopped processes are found, and whatever works is none, however long it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from serving_utils import stopped
from sglang.srt.process_watch import is_stopped, look_at
from sglang.srt.processes.child_process import BEAT_S, TurnLimit
from watched_processes import DETOKENIZER, LIMIT_S, SCHEDULER, WatchedProcesses


@pytest.fixture
def watched() -> Iterator[WatchedProcesses]:
    made = WatchedProcesses()
    yield made
    made.close()


def test_a_stopped_process_is_named_at_once_and_taken_back_at_once(
    watched: WatchedProcesses,
) -> None:
    watched.beat()
    assert watched.watch.all_beat(SCHEDULER, DETOKENIZER)
    for state in "Tt":
        watched.set_state(DETOKENIZER, state)
        stop = watched.watch.stopped()
        assert stop is not None
        assert stop.role == DETOKENIZER
        assert "The detokenizer process is stopped" in stop.message
        assert watched.watch.stopped(SCHEDULER) is None
        assert watched.watch.all_beat(SCHEDULER)
        assert not watched.watch.all_beat(SCHEDULER, DETOKENIZER)
        watched.set_state(DETOKENIZER, "S")
        assert watched.watch.stopped() is None


def test_a_process_that_neither_beats_nor_works_is_stopped_until_it_beats(
    watched: WatchedProcesses,
) -> None:
    watched.beat()
    watched.pass_s(4.0)
    assert watched.watch.stopped() is None
    watched.pass_s(2.0)
    watched.beat(DETOKENIZER)
    stop = watched.watch.stopped()
    assert stop is not None
    assert "The scheduler process has given no sign of life" in stop.message
    watched.beat(SCHEDULER)
    assert watched.watch.stopped() is None


@pytest.mark.parametrize(
    ("state", "beats", "uses_cpu"),
    [("S", True, 0.0), ("S", False, 1.0), ("R", False, 0.0)],
    ids=["the thread beats", "one call keeps all threads waiting", "others have the processors"],
)
def test_a_step_of_30_s_is_no_alarm(
    watched: WatchedProcesses, state: str, beats: bool, uses_cpu: float
) -> None:
    watched.beat()
    watched.set_state(SCHEDULER, state)
    watched.set_state(DETOKENIZER, state)
    for _ in range(30):
        watched.pass_s(1.0, beats, uses_cpu)
        assert watched.watch.stopped() is None
        assert watched.watch.overdue() is None


def test_before_its_first_beat_a_process_may_load_as_long_as_it_takes(
    watched: WatchedProcesses,
) -> None:
    watched.pass_s(10 * LIMIT_S)
    assert watched.watch.stopped() is None
    assert watched.watch.overdue() is None
    assert not watched.watch.all_beat(SCHEDULER, DETOKENIZER)


@pytest.mark.parametrize("state", ["T", "S", "R"])
def test_only_the_limit_ends_what_is_stopped_or_stuck(
    watched: WatchedProcesses, state: str
) -> None:
    """R: a thread that never lets the others run."""
    watched.beat()
    watched.set_state(SCHEDULER, state)
    watched.pass_s(LIMIT_S - 2)
    assert watched.watch.overdue() is None
    watched.beat(DETOKENIZER)
    watched.pass_s(10.0)
    assert "scheduler process" in (watched.watch.overdue() or "")


def test_time_in_which_the_watcher_was_stopped_itself_does_not_count(
    watched: WatchedProcesses,
) -> None:
    watched.beat()
    watched.watch.stopped()
    watched.now_s += 10 * LIMIT_S
    assert watched.watch.stopped() is None
    assert watched.watch.overdue() is None


def test_without_a_limit_nothing_is_given_up() -> None:
    watched = WatchedProcesses(limit_s=0.0)
    watched.set_state(SCHEDULER, "T")
    watched.pass_s(1000.0)
    assert watched.watch.overdue() is None
    watched.close()


def test_what_the_system_says_of_a_process() -> None:
    pid = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    try:
        with stopped(pid):
            assert is_stopped(pid)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert look_at(pid) is None
    mine = look_at(os.getpid())
    assert mine is not None
    assert mine.cpu_s == pytest.approx(time.process_time(), abs=0.5)


@dataclass
class Loop:
    num_turns: int = 0
    is_waiting: bool = False


def test_a_turn_that_never_ends_is_found_and_waiting_is_no_turn() -> None:
    loop = Loop()
    limit = TurnLimit(loop, limit_s=10 * BEAT_S)
    for _ in range(5):
        loop.num_turns += 1
        assert not any(limit.beat() for _ in range(10))
    loop.is_waiting = True
    assert not any(limit.beat() for _ in range(100))
    loop.is_waiting = False
    loop.num_turns += 1
    assert [limit.beat() for _ in range(11)] == [False] * 10 + [True]
    assert not any(TurnLimit(loop, limit_s=0.0).beat() for _ in range(100))
