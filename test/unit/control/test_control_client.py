"""Control calls against a scripted scheduler: replies, time limits, updates and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang.srt.control.bodies import (
    CommitWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightVersionReqInput,
    WeightUpdateOptions,
)
from sglang.srt.control.client import ControlClient
from sglang.srt.control.pause_bodies import (
    PauseGenerationReqInput,
)
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.messages import control as messages
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    ControlReply,
    EngineStatus,
    FromDirectory,
    GroupAddress,
    PauseGenerationReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightSessionReq,
)

OPTIONS = WeightUpdateOptions(weight_version="v2")
SOURCE = FromDirectory("checkpoint")
REFUSAL = {"success": False, "message": "no such file"}


class Scheduler:
    """Records what is sent; answers at once what a test has scripted by message type."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.scripts: dict[type, dict[str, Any]] = {}
        self.held: set[type] = set()
        self.client = ControlClient(self._take)

    def _take(self, message: Any) -> None:
        self.sent.append(message)
        if type(message) not in self.held:
            self.answer(message)

    def answer(self, message: Any) -> None:
        """Pushes the status that a message leads to, then its reply."""
        script = self.scripts.get(type(message), {})
        if isinstance(message, PauseGenerationReq):
            self.client.handle(EngineStatus(stopped=f"Paused: {message.mode}."))
        if isinstance(message, ContinueGenerationReq):
            self.client.handle(EngineStatus())
        reply = {"success": True, "message": "Done.", **script}
        self.client.handle(ControlReply(call_id=message.call_id, **reply))

    def answer_held(self, kind: type) -> None:
        """Answers the oldest message of a held kind, and later ones of it at once."""
        self.held.discard(kind)
        self.answer(next(m for m in self.sent if isinstance(m, kind)))

    async def wait_for(self, kind: type) -> None:
        while not any(isinstance(m, kind) for m in self.sent):
            await asyncio.sleep(0)

    @property
    def kinds(self) -> list[str]:
        return [_name(message) for message in self.sent]


def _name(message: Any) -> str:
    if isinstance(message, PauseGenerationReq):
        return message.mode
    if isinstance(message, WeightSessionReq):
        return message.action
    names = {
        ContinueGenerationReq: "continue",
        UpdateWeightsReq: "update",
        UpdateWeightVersionReq: "label",
    }
    return names[type(message)]


def play(scenario: Callable[[Scheduler], Awaitable[None]]) -> Scheduler:
    """Runs a scenario; nothing may wait for a reply after it."""

    async def main() -> Scheduler:
        scheduler = Scheduler()
        await asyncio.wait_for(scenario(scheduler), 10)
        assert not scheduler.client._replies
        return scheduler

    return asyncio.run(main())


def task_of(work: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work)


# ---------------------------------------------------------------- replies


def test_pause_and_continue_answer_with_the_schedulers_message_and_counts() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        scheduler.scripts[PauseGenerationReq] = {"fields": {"retracted": 3, "epoch": 1}}
        body = PauseGenerationReqInput(mode="retract", lease_s=5.0, lease_end="abort")
        answer = await scheduler.client.call(body.message())
        assert answer == {"message": "Done.", "status": "ok", "retracted": 3, "epoch": 1}
        (message,) = scheduler.sent
        assert (message.lease_s, message.lease_end) == (5.0, "abort")
        assert await scheduler.client.call(ContinueGenerationReq()) == {
            "message": "Done.",
            "status": "ok",
        }

    play(scenario)


@pytest.mark.parametrize(
    ("status_code", "kind"), [(400, RequestError), (409, RequestError), (500, ServiceError)]
)
def test_refusal_becomes_an_error_with_its_reason_and_status(
    status_code: int, kind: type[RequestError | ServiceError]
) -> None:
    async def scenario(scheduler: Scheduler) -> None:
        refusal = {**REFUSAL, "status_code": status_code}
        scheduler.scripts[WeightSessionReq] = refusal
        with pytest.raises(kind, match="no such file") as error:
            await scheduler.client.call(WeightSessionReq(action="begin"))
        assert error.value.status_code == status_code

    play(scenario)


def test_death_fails_waiting_calls_and_later_ones() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        scheduler.held = {UpdateWeightsReq}
        waiting = task_of(scheduler.client.call(OPTIONS.update(SOURCE)))
        await scheduler.wait_for(UpdateWeightsReq)
        scheduler.client.fail_all("The scheduler died.")
        for work in (waiting, scheduler.client.call(ContinueGenerationReq())):
            with pytest.raises(ServiceError, match="died"):
                await work

    play(scenario)


def test_drain_waits_as_long_as_it_was_told_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(scheduler: Scheduler) -> None:
        monkeypatch.setattr(messages, "CONTROL_TIMEOUT_S", 0.02)
        scheduler.held = {PauseGenerationReq}
        endless = task_of(scheduler.client.call(PauseGenerationReq(mode="drain")))
        limited = task_of(
            scheduler.client.call(PauseGenerationReq(mode="drain", drain_timeout_s=0.2))
        )
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="No answer"):
            await scheduler.client.call(PauseGenerationReq(mode="retract"))
        assert not limited.done()
        with pytest.raises(ServiceError, match=r"0\.22 s"):
            await limited
        assert not endless.done()
        scheduler.answer_held(PauseGenerationReq)
        await endless

    play(scenario)


def test_joining_a_group_waits_longer_than_its_own_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(scheduler: Scheduler) -> None:
        monkeypatch.setattr(messages, "CONTROL_TIMEOUT_S", 0.02)
        scheduler.client = ControlClient(scheduler.sent.append)
        body = InitWeightsUpdateGroupReqInput(
            master_address="host", master_port=1, rank_offset=1, world_size=2, timeout_s=0.05
        )
        with pytest.raises(ServiceError, match=r"0\.07 s"):
            await scheduler.client.call(body.message())
        assert scheduler.sent[0].join == GroupAddress(
            master_address="host",
            master_port=1,
            rank=1,
            world_size=2,
            backend="gloo",
            timeout_s=0.05,
        )

    play(scenario)


# ---------------------------------------------------------------- weight updates


def test_an_update_is_one_message_with_its_options() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        scheduler.scripts[UpdateWeightsReq] = {"fields": {"num_paused_requests": 2}}
        answer = await scheduler.client.call(OPTIONS.update(SOURCE))
        assert answer == {"success": True, "message": "Done.", "num_paused_requests": 2}

    scheduler = play(scenario)
    assert scheduler.kinds == ["update"]
    assert scheduler.sent[0].weight_version == "v2"
    assert scheduler.sent[0].source == SOURCE


def test_a_session_is_three_messages() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        await scheduler.client.call(WeightSessionReq(action="begin"))
        commit = CommitWeightUpdateReqInput(weight_version="v2")
        await scheduler.client.call(commit.message())
        await scheduler.client.call(WeightSessionReq(action="rollback"))

    scheduler = play(scenario)
    assert scheduler.kinds == ["begin", "commit", "rollback"]
    assert scheduler.sent[1].weight_version == "v2"


@pytest.mark.parametrize("aborts", [False, True])
def test_aborts_travel_with_the_update(aborts: bool) -> None:
    """The scheduler aborts when the update's turn comes, so nothing else is sent."""

    async def scenario(scheduler: Scheduler) -> None:
        options = WeightUpdateOptions(abort_all_requests=aborts)
        commit = CommitWeightUpdateReqInput(abort_all_requests=aborts)
        label = UpdateWeightVersionReqInput(new_version="v2", abort_all_requests=aborts)
        await scheduler.client.call(options.update(SOURCE))
        await scheduler.client.call(commit.message())
        await scheduler.client.call(label.message())

    scheduler = play(scenario)
    assert scheduler.kinds == ["update", "commit", "label"]
    assert [message.abort_all_requests for message in scheduler.sent] == [aborts] * 3


def test_a_new_label_aborts_unless_told_not_to() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        await scheduler.client.call(UpdateWeightVersionReqInput(new_version="v2").message())

    assert play(scenario).sent[0].abort_all_requests


def test_first_reason_of_a_failure_stays() -> None:
    async def scenario(scheduler: Scheduler) -> None:
        scheduler.client.fail_all("The scheduler died.")
        scheduler.client.fail_all("The server is shutting down.")
        with pytest.raises(ServiceError, match="died"):
            await scheduler.client.call(ContinueGenerationReq())

    play(scenario)
