"""Tokens per second: those of the last seconds of work, and none when nothing is done."""

from __future__ import annotations

import random

import pytest

from sglang.srt.observability.throughput import SLICE_S, WINDOW_S, Throughput


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.7, 3.0])
def test_a_steady_load_has_its_rate_from_its_first_step_on(step_s: float) -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.begin()
    for step in range(1, 2 + int(12 / step_s)):
        clock.now += step_s
        throughput.add(7 * step)
        assert throughput.tokens_per_s == pytest.approx(7 / step_s)
    assert len(throughput._totals) <= 3 + 2 * WINDOW_S / SLICE_S


def test_the_rate_is_that_of_a_window_of_any_load() -> None:
    draw, clock = random.Random(3), Clock()
    throughput = Throughput(clock)
    throughput.begin()
    events = [(clock.now, 0)]
    for _ in range(2000):
        clock.now += draw.expovariate(20)
        events.append((clock.now, events[-1][1] + draw.randint(0, 9)))
        throughput.add(events[-1][1])
        if clock.now > 100 + 2 * WINDOW_S:
            # Of a window that begins up to a slice and a step before the last seconds.
            ends = clock.now - WINDOW_S - SLICE_S - 0.5, clock.now - WINDOW_S
            rates = [
                (events[-1][1] - total) / (clock.now - at_s)
                for at_s, total in events
                if ends[0] <= at_s <= ends[1]
            ]
            assert min(rates) - 1e-9 <= throughput.tokens_per_s <= max(rates) + 1e-9


def test_an_idle_server_generates_nothing_and_forgets_the_time_without_work() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    assert throughput.tokens_per_s == 0
    throughput.begin()
    for step in range(1, 100):
        clock.now += 0.1
        throughput.add(step)
    clock.now += WINDOW_S + 0.1
    assert throughput.tokens_per_s == 0
    clock.now += 1000
    throughput.begin()
    clock.now += 0.5
    throughput.add(99 + 20)
    assert throughput.tokens_per_s == pytest.approx(40)
