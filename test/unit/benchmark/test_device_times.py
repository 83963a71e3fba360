"""Times over a GPU that is not there and whose clock falls, and copies of inputs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmark.device_times import SUSTAINED_S, burst_us, copies_to_exceed, sustained_us

FAST_MS, SLOW_MS, SLOW_AFTER_MS = 2.0, 3.0, 100.0


class FakeGpu:
    """A replay takes FAST_MS, and SLOW_MS once it has worked for SLOW_AFTER_MS without a rest."""

    def __init__(self) -> None:
        self.now_ms = self.busy_ms = 0.0
        self.num_replays = 0

    def replay(self) -> None:
        took_ms = FAST_MS if self.busy_ms < SLOW_AFTER_MS else SLOW_MS
        self.now_ms += took_ms
        self.busy_ms += took_ms
        self.num_replays += 1

    def rest(self, seconds: float) -> None:
        self.busy_ms = 0.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = gpu.now_ms

        def synchronize(self) -> None:
            """Nothing is under way."""

        def elapsed_time(self, end: Any) -> float:
            return float(end.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "sleep", gpu.rest)
    return gpu


def test_a_burst_comes_after_a_rest_and_ends_before_the_clock_falls(gpu: FakeGpu) -> None:
    for _ in range(100):
        gpu.replay()
    assert burst_us(gpu.replay, num_calls=4) == pytest.approx(FAST_MS * 1e3 / 4)


def test_a_sustained_time_is_that_of_the_clock_that_is_kept(gpu: FakeGpu) -> None:
    found = sustained_us(gpu.replay, 4, expected_us=FAST_MS * 1e3 / 4)
    assert found == pytest.approx(SLOW_MS * 1e3 / 4)
    assert gpu.now_ms >= SUSTAINED_S * 1e3


def test_calls_that_take_longer_than_the_whole_load_are_timed_too(gpu: FakeGpu) -> None:
    gpu.busy_ms = SLOW_AFTER_MS
    assert sustained_us(gpu.replay, 1, expected_us=1e7) == pytest.approx(SLOW_MS * 1e3)
    assert gpu.num_replays >= 2


@pytest.mark.parametrize(
    ("num_bytes", "num_calls", "expected"),
    [
        (100, 40, 2),  # one more, so that the cache is full of others
        (101, 40, 2),
        (99, 40, 3),
        (1000, 40, 2),
        (1, 40, 40),  # never more than calls
        (1000, 1, 1),
    ],
)
def test_copies_exceed_the_cache_but_not_the_calls(
    num_bytes: int, num_calls: int, expected: int
) -> None:
    assert copies_to_exceed(100, num_bytes, num_calls) == expected
