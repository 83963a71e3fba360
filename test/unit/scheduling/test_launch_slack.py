"""How long a launch waits for the next request of a client whose last one has just ended.

A fake device computes one step after the other on a clock of its own: waiting, launching and
reading take the host time while it does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from fake_worker import FakeWorker, oracle
from sglang.srt.messages.control import ContinueGenerationReq, PauseGenerationReq
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.scheduling.launch_slack import MAX_WAIT_S, WINDOW, LaunchSlack
from sglang.srt.scheduling.prompt_budget import DecodeLoad, PromptAllowance
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch
from utils import SchedulerHarness, Setup

PROMPT, NEXT_PROMPT = [5, 6, 7], [8, 9]
STOPPING_PROMPT = [3]
STOPPING_OUTPUT = oracle(STOPPING_PROMPT, 21)  # its last token is there for the first time
assert STOPPING_OUTPUT[-1] not in STOPPING_OUTPUT[:-1]


class FakeStep:
    """Blocks for a while, or is ready at once."""

    def __init__(self, advance: Callable[[float], None], blocked_s: float) -> None:
        self._advance, self._blocked_s = advance, blocked_s

    @property
    def is_ready(self) -> bool:
        return self._blocked_s == 0

    def wait(self) -> None:
        self._advance(self._blocked_s)


class SlackBench:
    """A LaunchSlack on a clock that only steps and waits advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slack = LaunchSlack(lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def read(self, *blocked_s: float) -> float:
        """Reads steps; what may then be waited."""
        for seconds in blocked_s:
            self.slack.wait_for_step(FakeStep(self.advance, seconds))
            self.now += 0.001  # reading and launching: no spare time
        return self.slack.wait_s


@pytest.mark.parametrize(
    ("spare_s", "wait_s"),
    [(0.0041, 0.003), (0.0039, 0.002), (0.0013, 0.0), (0.0, 0.0), (0.5, MAX_WAIT_S)],
)
def test_three_quarters_of_the_spare_time_in_whole_milliseconds(
    spare_s: float, wait_s: float
) -> None:
    assert SlackBench().read(*[spare_s] * WINDOW) == wait_s


def test_the_least_of_the_last_steps_counts() -> None:
    bench = SlackBench()
    assert bench.read(*[0.0041] * (WINDOW - 1)) == 0  # too few to tell
    assert bench.read(0.0021) == 0.001
    assert bench.read(*[0.0041] * (WINDOW - 1)) == 0.001
    assert bench.read(0.0041) == 0.003
    assert bench.read(0.0) == 0  # the device ran dry
    assert bench.read(*[0.0041] * WINDOW) == 0.003
    bench.slack.forget()
    bench.advance(1000.0)
    assert bench.read(*[0.0041] * (WINDOW - 1)) == 0
    assert bench.read(0.0041) == 0.003


def test_what_was_waited_for_messages_is_spare_time_too() -> None:
    """Else a wait would shorten the next ones; and it does not lengthen them."""
    bench = SlackBench()
    bench.read(*[0.0041] * WINDOW)
    waits: list[float] = []

    def for_message(wait_s: float) -> None:
        waits.append(wait_s)
        bench.advance(wait_s)

    for _ in range(3 * WINDOW):
        bench.slack.wait(for_message)
        bench.read(0.0011)
    assert waits == [0.003] * (3 * WINDOW)
    assert bench.read(*[0.0041] * WINDOW) == 0.003  # nothing was waited before these
    bench.slack.wait(for_message)
    assert bench.read(0.0) == 0  # this time it was too long


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
    device_free_s = idle_s = 0.0

    def forward_batch_generation(self, batch: ScheduleBatch) -> Any:
        self.harness.now += self.launch_s
        begin = max(self.device_free_s, self.harness.now)
        self.idle_s += begin - self.device_free_s
        self.device_free_s = begin + self.step_s
        result = super().forward_batch_generation(batch)
        return TimedResult(result, self.harness, self.device_free_s)

    def observe(self, result: HostResult) -> None:
        self.harness.now += self.read_s
        super().observe(result)


class Clients:
    """A harness whose clients send their next request `answer_s` after the last one's end."""

    def __init__(
        self,
        waits: bool = True,
        answer_s: float = math.inf,
        kind: str = "plain",
        max_running: int = 8,
        **times: float,
    ) -> None:
        setup = Setup(enable_overlap=True, max_running_requests=max_running, num_pages=4096)
        self.worker = TimedWorker(kind, 1 if kind == "plain" else 3, max_running + 1, seed=0)
        vars(self.worker).update(times)
        self.harness = self.worker.harness = SchedulerHarness(setup, self.worker)
        self.harness.inbox.wait = self._wait  # type: ignore[method-assign]
        if not waits:
            self.harness.scheduler._await_arrival = lambda: None  # type: ignore[method-assign]
        self.waits: list[float] = []
        self._answer_s = answer_s
        self._arrivals: list[float] = []
        self._ended: set[int] = set()
        self._lengths: list[int] = []
        self.sent: dict[int, tuple[list[int], int]] = {}

    def send(self, prompt: list[int], length: int) -> int:
        request = self.harness.submit(prompt, max_new_tokens=length, ignore_eos=True)
        self.sent[request] = prompt, length
        return request

    def run(self, first: list[int], later: list[int] | None = None) -> float:
        """Seconds until all is done; every request gets its tokens."""
        self._lengths = list(later or [])
        for length in first:
            self.send(PROMPT, length)
        start = self.harness.now
        while not self.harness.is_idle or self._arrivals:
            if self.harness.is_idle:
                self.harness.now = max(self.harness.now, self._arrivals[0])
            self._deliver()
            self.harness.step()
            for request, output in self.harness.outputs.items():
                if output.num_ends and request not in self._ended:
                    self._ended.add(request)
                    self._answer()
        for request, (prompt, length) in self.sent.items():
            assert self.harness.outputs[request].token_ids == oracle(prompt, length)
        return self.harness.now - start

    def _answer(self) -> None:
        if self._lengths and self._answer_s < math.inf:
            self._arrivals.append(self.harness.now + self._answer_s)

    def _deliver(self) -> None:
        while self._arrivals and self._arrivals[0] <= self.harness.now:
            self._arrivals.pop(0)
            self.send(NEXT_PROMPT, self._lengths.pop())

    def _wait(self, timeout_s: float | None) -> None:
        """As zmq's poll: whole milliseconds, or until a message comes."""
        assert timeout_s is not None
        scheduler = self.harness.scheduler
        assert scheduler.control.state.admits
        assert not scheduler.lifecycle.waiting
        assert self.harness.ledger.num_free_rows > 0, "Nobody could start."
        self.waits.append(timeout_s)
        end = self.harness.now + math.ceil(timeout_s * 1000) / 1000
        for request, output in self.harness.outputs.items():  # what this turn has just ended
            if output.num_ends and request not in self._ended:
                self._ended.add(request)
                self._answer()
        if self._arrivals and self._arrivals[0] <= end:
            end = max(self.harness.now, self._arrivals[0])
        self.harness.now = end
        self._deliver()


LOADS = [  # milliseconds of a step, a launch, a read
    (6.0, 1.2, 0.6),
    (6.5, 1.8, 0.6),
    (3.0, 0.7, 0.7),
    (3.2, 1.0, 0.5),
    (2.0, 0.4, 0.9),
    (1.0, 1.0, 1.8),  # the host sets the pace
    (0.1, 0.5, 3.0),
]


@pytest.mark.parametrize("kind", ["plain", "mtp"])
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_waiting_for_nobody_costs_the_device_nothing(
    load: tuple[float, float, float], kind: str
) -> None:
    """One request ends per step and no client sends another, as at the end of a batch."""
    step_s, launch_s, read_s = (value / 1000 for value in load)
    seconds = {}
    for waits in (False, True):
        clients = Clients(
            waits, kind=kind, max_running=64, step_s=step_s, launch_s=launch_s, read_s=read_s
        )
        seconds[waits] = clients.run([20 + i for i in range(64)])
        assert bool(clients.waits) == (waits and step_s - launch_s - read_s > 1.34e-3)
    assert seconds[True] <= seconds[False] + 1e-9


def test_a_much_shorter_step_costs_no_more_than_one_wait() -> None:
    seconds = {}
    for waits in (False, True):
        clients = Clients(waits, max_running=16)
        clients.worker.step_s = 0.018
        for length in range(10, 26):
            clients.send(PROMPT, length)
        while clients.harness.num_steps < 12:
            clients.harness.step()
        clients.worker.step_s = 0.002
        seconds[waits] = clients.run([])
    assert seconds[True] <= seconds[False] + MAX_WAIT_S


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_a_closed_loop_keeps_more_places_busy(kind: str) -> None:
    """Four clients, each of which answers within 2 ms: fewer steps for the same tokens."""
    num_steps, idle_s = {}, {}
    for waits in (False, True):
        clients = Clients(waits, answer_s=0.002, kind=kind)
        clients.run([30, 37, 44, 51], later=[30] * 40)
        assert len(clients.sent) == 44
        num_steps[waits], idle_s[waits] = clients.harness.num_steps, clients.worker.idle_s
    assert num_steps[True] <= num_steps[False] - 8
    assert idle_s[True] == pytest.approx(idle_s[False], abs=0.02)


def test_the_next_request_of_a_client_takes_the_place_of_its_last_one() -> None:
    clients = Clients(answer_s=0.001)
    sizes: list[int] = []
    step = clients.harness.step

    def recorded() -> None:
        step()
        ongoing = clients.harness.ongoing
        sizes.append(0 if ongoing is None else len(ongoing.rows))

    clients.harness.step = recorded  # type: ignore[method-assign]
    clients.run([60, 20], later=[5])
    # The step that was in flight when its last one was read is the only one without either.
    first_alone = sizes.index(1)
    assert sizes[:first_alone] == [2] * first_alone
    assert sizes[first_alone + 1 : first_alone + 6] == [2] * 5


@pytest.mark.parametrize("max_running", [4, 8])
def test_one_wait_at_most_for_each_end(max_running: int) -> None:
    """With four places a place is free only when the surplus step is read, and then nobody waits
    for a client that ended before (`Clients` checks each wait)."""
    clients = Clients(max_running=max_running, kind="mtp")
    clients.run([20, 30, 40, 50])
    assert 1 <= len(clients.waits) <= 3  # the last end leaves nothing in flight


def test_the_place_of_a_stopped_request_is_free_one_step_later() -> None:
    """Nobody knew that it would stop, so the step in flight still holds its row."""
    for max_running, num_waits in ((4, 0), (5, 1)):
        clients = Clients(max_running=max_running)
        for _ in range(3):
            clients.send(PROMPT, 60)
        stop = STOPPING_OUTPUT[-1]
        stopped = clients.harness.submit(
            STOPPING_PROMPT, max_new_tokens=60, ignore_eos=True, stop_token_ids=[stop]
        )
        while clients.harness.outputs[stopped].num_ends == 0:
            clients.harness.step()
        for _ in range(3):
            clients.harness.step()
        assert clients.harness.outputs[stopped].token_ids == STOPPING_OUTPUT
        assert len(clients.waits) == num_waits


def test_nobody_is_waited_for_while_requests_wait_for_a_place() -> None:
    clients = Clients(max_running=4)
    for length in range(15, 27):
        clients.send(PROMPT, length)
    while clients.harness.scheduler.lifecycle.waiting or clients.harness.inbox.messages:
        clients.harness.step()
        assert clients.waits == []
    clients.run([])
    assert clients.waits  # the last ones leave places that nobody waits for


def test_a_drain_waits_for_nobody() -> None:
    clients = Clients()
    for length in (20, 24, 28, 32):
        clients.send(PROMPT, length)
    for _ in range(WINDOW + 2):
        clients.harness.step()
    message = PauseGenerationReq(call_id=1, mode="drain")
    clients.harness.inbox.messages.append(message)
    clients.harness.run()
    assert clients.waits == []


def test_idle_time_is_no_spare_time() -> None:
    clients = Clients()
    clients.run([30])
    clients.harness.now += 100.0
    clients.run([3, 5, 30])
    assert clients.waits == []  # they end before enough steps are known


def test_without_overlap_there_is_nothing_to_wait_for() -> None:
    setup = Setup(enable_overlap=False)
    harness = SchedulerHarness(setup, FakeWorker("plain", 1, setup.max_running_requests + 1, 0))
    waits: list[Any] = []
    harness.inbox.wait = waits.append  # type: ignore[method-assign]
    harness.generate([PROMPT] * 3, max_new_tokens=30, ignore_eos=True)
    assert waits == []


def test_a_step_took_the_time_since_the_end_of_the_one_before() -> None:
    bench = SlackBench()

    def took(blocked_s: float) -> float | None:
        bench.advance(0.001)  # reading and launching, while the device computes
        return bench.slack.wait_for_step(FakeStep(bench.advance, blocked_s))

    assert took(0.005) is None, "Nobody saw the end of the one before."
    assert took(0.005) == pytest.approx(0.006)
    assert took(0.0) is None, "Nobody saw when it ended,"
    assert took(0.005) is None, "so not when this one began."
    assert took(0.007) == pytest.approx(0.008)
    bench.slack.forget()
    bench.advance(100.0)
    assert took(0.005) is None
    assert took(0.005) == pytest.approx(0.006)


STEP_MS, TOKEN_MS = 2.0, 0.25


class PricedAllowance(PromptAllowance):
    @property
    def price_ms(self) -> float | None:
        return STEP_MS + TOKEN_MS * self.num_taken if self.num_taken else None


class ListeningBudget:
    """Prices of steps as `ExactWorker` takes them, and what was observed of these."""

    def __init__(self) -> None:
        self.observed: list[tuple[float, float]] = []
        self._random = random.Random(0)

    def open(self, decodes: DecodeLoad) -> PromptAllowance:
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
