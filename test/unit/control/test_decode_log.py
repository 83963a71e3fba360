"""The scheduler's log says what the running batch does, every so many steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fake_worker import FakeWorker
from sglang.srt.control.decode_log import PERIOD_S
from utils import FakeInbox, SchedulerHarness, Setup

STEP_S = 0.5


class PatientInbox(FakeInbox):
    """Lets a scheduler wait that has nothing to do."""

    def wait(self, timeout_s: float | None) -> bool:
        return True


class Log:
    """A scheduler whose steps take `STEP_S` each, and the lines that it writes."""

    def __init__(self, caplog: pytest.LogCaptureFixture, kind: str = "plain", **setup: Any) -> None:
        caplog.set_level(logging.INFO, logger="sglang.srt.control.decode_log")
        self._caplog = caplog
        self.harness = SchedulerHarness(Setup(**setup), FakeWorker(kind, 3, 8, 0))
        self.harness.inbox = self.harness.scheduler._inbox = PatientInbox()

    def run(self, num_tokens: int, num_requests: int = 1) -> list[str]:
        """New lines while requests with a prompt of 3 tokens run."""
        self._caplog.clear()
        for _ in range(num_requests):
            self.harness.submit([1, 2, 3], max_new_tokens=num_tokens, ignore_eos=True)
        while not self.harness.is_idle:
            self.harness.now += STEP_S
            self.harness.step()
        self.harness.scheduler._wait_for_message()
        return [record.getMessage() for record in self._caplog.records]


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_a_line_comes_every_so_many_decode_steps(
    caplog: pytest.LogCaptureFixture, enable_overlap: bool
) -> None:
    log = Log(caplog, decode_log_interval=4, enable_overlap=enable_overlap)
    lines = log.run(num_tokens=21)
    assert len(lines) == 5, "the step of the prompt is no decode step"
    assert all(line.startswith("Decode: 1 running, 0 queued, KV ") for line in lines[:-1])
    assert all(line.endswith(f" tokens), {1 / STEP_S:.1f} tokens/s.") for line in lines)


def test_short_requests_add_up_and_the_time_between_them_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(caplog, decode_log_interval=4, enable_overlap=False)
    assert log.run(num_tokens=3) == []
    log.harness.now += 1000
    assert log.run(num_tokens=3) == ["Decode: 0 running, 0 queued, KV 0% (0 tokens), 2.0 tokens/s."]


def test_who_waits_for_a_place_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog, decode_log_interval=4, max_running_requests=2, enable_overlap=False)
    first = log.run(num_tokens=21, num_requests=3)[0]
    assert first.startswith("Decode: 2 running, 1 queued, ")
    assert first.endswith(f" {2 / STEP_S:.1f} tokens/s.")


def test_without_an_interval_a_line_comes_by_time(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog, decode_log_interval=None, enable_overlap=False)
    num_steps = round(2 * PERIOD_S / STEP_S)
    assert len(log.run(num_tokens=1 + num_steps)) == 2


def test_0_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert Log(caplog, decode_log_interval=0).run(num_tokens=100) == []


def test_the_accept_length_is_that_of_the_steps_of_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(caplog, "verify", decode_log_interval=4, enable_overlap=False)
    stats = log.harness.scheduler.stats
    stats.take_accept_length = lambda: 2.345  # type: ignore[method-assign]
    assert log.run(num_tokens=21)[0].endswith(" tokens/s, accept length 2.35.")


def test_a_drafter_has_its_tier_at_the_end_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog, decode_log_interval=4, enable_overlap=False)
    log.harness.scheduler.stats.has_drafter = True
    assert log.run(num_tokens=21)[0].endswith(" tokens/s, tier 0.")
