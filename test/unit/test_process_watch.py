"""Stopped processes are found, and whatever works is none, however long it takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from serving_utils import wait_until
from sglang.srt.process_watch import LOOK_S, ProcessLook, ProcessWatch, is_stopped, look_at
from sglang.srt.processes.child_process import BEAT_S, TurnLimit

ROLE = "scheduler"
LIMIT_S = 60.0
SLEEPING = ProcessLook("S", 3.0)


class Watched:
    """A watch of one process whose looks, beats and clock a test sets."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.look: ProcessLook | None = SLEEPING
        self.now_s = 0.0
        self.watch = ProcessWatch(limit_s, lambda pid: self.look, lambda: self.now_s)
        reading, self._writing = os.pipe()
        self.watch.add(ROLE, 1, reading)

    def beat(self) -> None:
        os.write(self._writing, b".")

    def pass_s(self, seconds: float, beats: bool = False, uses_cpu: float = 0.0) -> None:
        """Lets time pass and looks every quarter of a second.

        Args:
            uses_cpu: share of a processor that the process uses meanwhile.
        """
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if beats:
                self.beat()
            if self.look is not None:
                self.look = replace(self.look, cpu_s=self.look.cpu_s + uses_cpu * LOOK_S)
            self.watch.overdue()

    def close(self) -> None:
        self.watch.close()
        os.close(self._writing)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def test_a_stopped_process_is_named_at_once_and_taken_back_at_once(watched: Watched) -> None:
    watched.beat()
    assert watched.watch.stopped() is None
    for state in "Tt":
        watched.look = replace(SLEEPING, state=state)
        stop = watched.watch.stopped()
        assert stop is not None
        assert stop.role == ROLE
        assert "The scheduler process is stopped" in stop.message
        assert watched.watch.stopped("detokenizer") is None
        watched.look = SLEEPING
        assert watched.watch.stopped() is None


def test_a_process_that_neither_beats_nor_works_is_stopped_until_it_beats(watched: Watched) -> None:
    watched.beat()
    watched.pass_s(4.0)
    assert watched.watch.stopped() is None
    watched.pass_s(2.0)
    stop = watched.watch.stopped(ROLE)
    assert stop is not None
    assert "no sign of life" in stop.message
    watched.beat()
    assert watched.watch.stopped() is None


@pytest.mark.parametrize(
    ("state", "beats", "uses_cpu"),
    [("S", True, 0.0), ("S", False, 1.0), ("R", False, 0.0)],
    ids=["the thread beats", "one call keeps all threads waiting", "others have the processors"],
)
def test_a_step_of_30_s_is_no_alarm(
    watched: Watched, state: str, beats: bool, uses_cpu: float
) -> None:
    watched.beat()
    watched.look = replace(SLEEPING, state=state)
    for _ in range(30):
        watched.pass_s(1.0, beats, uses_cpu)
        assert watched.watch.stopped() is None
        assert watched.watch.overdue() is None


def test_before_its_first_beat_a_process_may_load_as_long_as_it_takes(watched: Watched) -> None:
    watched.pass_s(10 * LIMIT_S)
    assert watched.watch.stopped() is None
    assert watched.watch.overdue() is None


@pytest.mark.parametrize("state", ["T", "S", "R"])
def test_only_the_limit_ends_what_is_stopped_or_stuck(watched: Watched, state: str) -> None:
    """R: a thread that never lets the others run."""
    watched.beat()
    watched.look = replace(SLEEPING, state=state)
    watched.pass_s(LIMIT_S - 2)
    assert watched.watch.overdue() is None
    watched.pass_s(10.0)
    assert "scheduler process" in (watched.watch.overdue() or "")


def test_time_in_which_the_watcher_was_stopped_itself_does_not_count(watched: Watched) -> None:
    watched.beat()
    watched.watch.stopped()
    watched.now_s += 10 * LIMIT_S
    assert watched.watch.stopped() is None
    assert watched.watch.overdue() is None


def test_without_a_limit_nothing_is_given_up() -> None:
    watched = Watched(limit_s=0.0)
    watched.look = replace(SLEEPING, state="T")
    watched.pass_s(1000.0)
    assert watched.watch.overdue() is None
    watched.close()


def test_what_the_system_says_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(child.pid))
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: not is_stopped(child.pid))
    finally:
        child.kill()
        child.wait()
    assert look_at(child.pid) is None
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
