"""Tests how the time of a step, as the host sees it, is compared with its price.

A fake device computes one step after the other on a clock of its own: launching and reading take
the host time while it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fake_worker import FakeWorker
from sglang.srt.lookahead.prompt_budget import PromptAllowance, PromptBudget
from sglang.srt.messages.control import ContinueGenerationReq, PauseGenerationReq
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.scheduling.step_times import StepTimes
from sglang.srt.step.price_table import StepShape
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch
from utils import SchedulerHarness, Setup


class FakeStep:
    """Blocks for a while, or is ready at once."""

    def __init__(self, advance: Callable[[float], None], blocked_s: float) -> None:
        self._advance, self._blocked_s = advance, blocked_s

    @property
    def is_ready(self) -> bool:
        return self._blocked_s == 0

    def wait(self) -> None:
        self._advance(self._blocked_s)


def test_a_step_took_the_time_since_the_end_of_the_one_before() -> None:
    now = 0.0
    times = StepTimes(lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    def took(blocked_s: float) -> float | None:
        advance(0.001)  # reading and launching, while the device computes
        return times.wait_for(FakeStep(advance, blocked_s))

    assert took(0.005) is None, "Nobody saw the end of the one before."
    assert took(0.005) == pytest.approx(0.006)
    assert took(0.0) is None, "Nobody saw when it ended,"
    assert took(0.005) is None, "so not when this one began."
    assert took(0.007) == pytest.approx(0.008)
    times.forget()
    advance(100.0)
    assert took(0.005) is None
    assert took(0.005) == pytest.approx(0.006)


class TimedResult:
    """Ready when the device is done with its step."""

    def __init__(self, result: GenerationBatchResult, harness: SchedulerHarness, end_s: float):
        self._result, self._harness, self._end_s = result, harness, end_s

    @property
    def is_ready(self) -> bool:
        return self._harness.now >= self._end_s

    def wait(self) -> None:
        self._harness.now = max(self._harness.now, self._end_s)

    def read(self) -> HostResult:
        self.wait()
        return self._result.read()


class TimedWorker(FakeWorker):
    """Launches, steps and reads take time."""

    harness: SchedulerHarness
    launch_s, step_s, read_s = 0.0012, 0.006, 0.0006
    device_free_s = 0.0

    def forward_batch_generation(self, batch: ScheduleBatch) -> Any:
        self.harness.now += self.launch_s
        begin = max(self.device_free_s, self.harness.now)
        self.device_free_s = begin + self.step_s
        result = super().forward_batch_generation(batch)
        return TimedResult(result, self.harness, self.device_free_s)

    def observe(self, result: HostResult) -> None:
        self.harness.now += self.read_s
        super().observe(result)


STEP_MS, TOKEN_MS = 2.0, 0.25


class PricedAllowance(PromptAllowance):
    @property
    def price_ms(self) -> float | None:
        return STEP_MS + TOKEN_MS * self.num_taken if self.num_taken else None


class ListeningBudget(PromptBudget):
    """Prices of steps as `ExactWorker` takes them, and what was observed of these."""

    def __init__(self) -> None:
        super().__init__(40)
        self.observed: list[tuple[float, float]] = []
        self._random = random.Random(0)

    def open(self, decodes: StepShape, someone_streams: bool) -> PromptAllowance:
        return PricedAllowance(self._random.randint(1, 40))

    def observe(self, price_ms: float, took_ms: float) -> None:
        self.observed.append((price_ms, took_ms))


class ExactWorker(TimedWorker):
    """The more prompt tokens, the longer a step, and far longer with their log-probabilities.
    Sometimes the host is late."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._random = random.Random(1)

    def forward_batch_generation(self, batch: ScheduleBatch) -> Any:
        self.step_s = (STEP_MS + TOKEN_MS * sum(batch.num_prompt_tokens)) / 1e3
        if batch.logprobs is not None and batch.logprobs.prompt_rows:
            self.step_s *= 3
        self.launch_s = self._random.choice([0.0001, 0.0005, 0.02])
        return super().forward_batch_generation(batch)


@pytest.mark.parametrize("retract_interval", [0, 5])
@pytest.mark.parametrize("num_pages", [4096, 150])
def test_what_a_step_took_is_compared_with_its_own_price(
    num_pages: int, retract_interval: int
) -> None:
    """Steps with and without prompts, retractions that read a step before the next is launched,
    aborts, pauses, idle times: either the right time is seen, or none."""
    budget = ListeningBudget()
    setup = Setup(
        enable_overlap=True,
        num_pages=num_pages,
        use_radix_cache=False,
        retract_interval=retract_interval,
        make_budget=lambda: budget,
    )
    worker = ExactWorker("plain", 1, setup.max_running_requests + 1, 0)
    harness = worker.harness = SchedulerHarness(setup, worker)
    rng = random.Random(2)
    for number in range(60):
        if rng.random() < 0.5:
            text = [rng.randrange(50) for _ in range(rng.choice([3, 30, 80]))]
            options = LogprobOptions(start_len=0) if rng.random() < 0.3 else None
            new = rng.randint(1, 20)
            harness.submit(text, max_new_tokens=new, ignore_eos=True, logprobs=options)
        for _ in range(rng.choice([0, 1, 1, 2, 8])):
            harness.step()
        if number % 20 == 19:
            harness.run()
            harness.now += 100.0
        elif number % 7 == 6:
            harness.call(PauseGenerationReq(call_id=number, mode="retract"))
            harness.now += 3.0
            harness.call(ContinueGenerationReq(call_id=1000 + number))
    harness.run()
    assert len(budget.observed) > 10
    for price_ms, took_ms in budget.observed:
        assert took_ms == pytest.approx(price_ms)
