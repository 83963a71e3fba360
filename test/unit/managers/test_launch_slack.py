"""How long a launch waits for the next request of a client whose last one has just ended."""

from __future__ import annotations

import pytest

from fake_worker import FakeWorker, oracle
from sglang.srt.base_worker import GenerationBatchResult, HostResult, ScheduleBatch
from sglang.srt.managers.launch_slack import MAX_WAIT_S, WINDOW, LaunchSlack
from utils import SchedulerHarness, Setup

PROMPT, NEXT_PROMPT = [5, 6, 7], [8, 9]


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(
    step_s: float, launch_s: float, num_steps: int = WINDOW + 1
) -> tuple[LaunchSlack, Time]:
    """After so many steps of a loop that reads and launches."""
    clock = Time()
    slack = LaunchSlack(clock)
    for _ in range(num_steps):
        slack.on_read()
        start = clock.now
        clock.now += launch_s
        slack.on_launch(start)
        clock.now += step_s - launch_s
    return slack, clock


@pytest.mark.parametrize(
    ("step_s", "launch_s", "wait_s"),
    [
        (0.006, 0.001, 0.004),
        (0.006, 0.0025, 0.001),
        (0.006, 0.003, 0.0),  # the host has no time to lose
        (0.006, 0.006, 0.0),
        (0.5, 0.001, MAX_WAIT_S),
    ],
)
def test_the_wait_leaves_the_host_twice_the_time_of_a_launch(
    step_s: float, launch_s: float, wait_s: float
) -> None:
    slack, _ = watched(step_s, launch_s)
    assert slack.wait_s == pytest.approx(wait_s, abs=1e-9)


def test_one_short_step_shortens_the_wait_until_it_is_forgotten() -> None:
    slack, clock = watched(0.006, 0.001)
    clock.now -= 0.003  # the step before this read took only half as long
    slack.on_read()
    assert slack.wait_s == pytest.approx(0.001)
    for num_left in reversed(range(WINDOW)):
        clock.now += 0.006
        slack.on_read()
        assert slack.wait_s == pytest.approx(0.001 if num_left else 0.004)


def test_nothing_is_waited_before_enough_steps_are_known() -> None:
    assert watched(0.006, 0.001, num_steps=WINDOW)[0].wait_s == 0
    slack, clock = watched(0.006, 0.001)
    slack.on_rest()
    assert slack.wait_s == 0
    clock.now += 1000.0  # idle time is no step's
    for _ in range(WINDOW):
        slack.on_read()
        assert slack.wait_s == 0
        clock.now += 0.006
    slack.on_read()
    assert slack.wait_s == pytest.approx(0.004)


class TimedWorker(FakeWorker):
    """Launches and steps take time."""

    harness: SchedulerHarness
    launch_s, step_s = 0.001, 0.006

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self.harness.now += self.launch_s
        return super().forward_batch_generation(batch)

    def observe(self, result: HostResult) -> None:
        self.harness.now += self.step_s - self.launch_s
        super().observe(result)


def timed_harness(overlap: bool = True, **times: float) -> tuple[SchedulerHarness, list[float]]:
    """And the waits of its loop."""
    setup = Setup(enable_overlap=overlap)
    worker = TimedWorker("plain", 1, setup.max_running_requests + 1, seed=0)
    vars(worker).update(times)
    harness = worker.harness = SchedulerHarness(setup, worker)
    waits: list[float] = []

    def wait(timeout_s: float | None) -> None:
        assert timeout_s is not None
        waits.append(timeout_s)

    harness.inbox.wait = wait  # type: ignore[method-assign]
    return harness, waits


def test_the_next_request_of_a_client_takes_the_place_of_its_last_one() -> None:
    harness, waits = timed_harness()
    long = harness.submit(PROMPT, max_new_tokens=60, ignore_eos=True)
    short = harness.submit(PROMPT, max_new_tokens=20, ignore_eos=True)
    sizes: list[int] = []
    following: list[int] = []

    def answer(timeout_s: float | None) -> None:
        if not following:
            following.append(harness.submit(NEXT_PROMPT, max_new_tokens=5, ignore_eos=True))
        waits.append(timeout_s or 0.0)

    harness.inbox.wait = answer  # type: ignore[method-assign]
    while not harness.is_idle:
        harness.step()
        sizes.append(0 if harness.ongoing is None else len(harness.ongoing.rows))
    assert waits[0] == pytest.approx(0.004)
    # The step that was in flight when its last one was read is the only one without either.
    first_alone = sizes.index(1)
    assert sizes[:first_alone] == [2] * first_alone
    assert sizes[first_alone + 1 : first_alone + 6] == [2] * 5
    for request, prompt, count in (
        (long, PROMPT, 60),
        (short, PROMPT, 20),
        (following[0], NEXT_PROMPT, 5),
    ):
        assert harness.outputs[request].token_ids == oracle(prompt, count)


@pytest.mark.parametrize("times", [{"launch_s": 0.003}, {"launch_s": 0.0, "step_s": 0.0}], ids=str)
def test_a_loop_whose_host_is_slow_waits_for_nobody(times: dict[str, float]) -> None:
    harness, waits = timed_harness(**times)
    for count in (20, 30, 40):
        harness.submit(PROMPT, max_new_tokens=count, ignore_eos=True)
    harness.run()
    assert waits == []


def test_nobody_is_waited_for_while_requests_wait_for_a_place() -> None:
    harness, waits = timed_harness()
    count = 2 * harness.setup.max_running_requests
    lengths = range(15, 15 + count)
    requests = [harness.submit(PROMPT, max_new_tokens=n, ignore_eos=True) for n in lengths]
    while harness.scheduler.lifecycle.waiting or harness.inbox.messages:
        harness.step()
        assert waits == []
    harness.run()
    assert waits  # the last ones leave places that nobody waits for
    for length, request in zip(lengths, requests, strict=True):
        assert harness.outputs[request].token_ids == oracle(PROMPT, length)


def test_without_overlap_there_is_nothing_to_wait_for() -> None:
    harness, waits = timed_harness(overlap=False)
    harness.submit(PROMPT, max_new_tokens=30, ignore_eos=True)
    harness.submit(PROMPT, max_new_tokens=20, ignore_eos=True)
    harness.run()
    assert waits == []
