"""The front end while a child is stopped: what was sent waits, what is asked is answered, and what
is new is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_backend import LENGTH, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    ControlReply,
    GetInternalStateReqOutput,
)
from sglang.srt.tokenizer import Tokenizer, load_tokenizer
from watched_processes import DETOKENIZER, SCHEDULER, WatchedProcesses

STOPPED = "The scheduler process is stopped"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture
def watched() -> Iterator[WatchedProcesses]:
    made = WatchedProcesses()
    made.beat()
    yield made
    made.close()


def test_what_was_sent_before_waits_and_what_is_new_is_refused(
    tokenizer: Tokenizer, watched: WatchedProcesses
) -> None:
    async def scenario(backend: Backend) -> None:
        control = backend.manager.control
        request = asyncio.create_task(answer_of(backend, text="a"))
        await backend.wait_sent(1)
        call = asyncio.create_task(control.call(ContinueGenerationReq()))
        await backend.wait_sent(2)
        watched.set_state(SCHEDULER, "T")
        for new in (answer_of(backend, text="b"), control.call(ContinueGenerationReq())):
            with pytest.raises(ServiceError, match=STOPPED):
                await new
        with pytest.raises(ServiceError, match=STOPPED):
            await control.flush_cache()
        assert len(backend.sent) == 2
        await asyncio.sleep(0.3)
        assert not request.done()
        assert not call.done()
        watched.set_state(SCHEDULER, "S")
        call_id = backend.sent[1].call_id
        backend.inbox.put_nowait(ControlReply(call_id=call_id, success=True, message="Done."))
        backend.put(0, "x", (1,), LENGTH)
        assert (await request)["text"] == "x"
        assert (await call)["message"] == "Done."

    run(tokenizer, scenario, watched.watch)


def test_a_question_is_answered_by_the_last_state_or_given_up(
    tokenizer: Tokenizer, watched: WatchedProcesses
) -> None:
    """Also one that was sent before the stop."""

    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        for knows_state in (False, True):
            watched.set_state(SCHEDULER, "S")
            count = len(backend.sent)
            asked = asyncio.create_task(manager.control.internal_state())
            pinged = asyncio.create_task(manager.control.ping(20.0))
            await backend.wait_sent(count + 2)
            watched.set_state(SCHEDULER, "T")
            with pytest.raises(ServiceError, match=STOPPED):
                await pinged
            for state in (asked, asyncio.create_task(manager.control.internal_state())):
                if knows_state:
                    assert (await state)["running_batch_size"] == 2
                    assert (await state)["stopped_process"] == SCHEDULER
                    assert (await state)["state_age_s"] > 0
                else:
                    with pytest.raises(ServiceError, match=STOPPED):
                        await state
            if not knows_state:
                watched.set_state(SCHEDULER, "S")
                fresh = asyncio.create_task(manager.control.internal_state())
                await backend.wait_sent(count + 3)
                reply = GetInternalStateReqOutput(
                    call_id=backend.sent[-1].call_id, internal_state={"running_batch_size": 2}
                )
                backend.inbox.put_nowait(reply)
                assert (await fresh)["stopped_process"] is None

    run(tokenizer, scenario, watched.watch)


def test_a_process_that_beats_is_healthy_though_a_step_leaves_no_time_for_an_answer(
    tokenizer: Tokenizer, watched: WatchedProcesses
) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.manager.health_ping(0.01)
        watched.set_state(DETOKENIZER, "T")
        with pytest.raises(ServiceError, match="The detokenizer process is stopped"):
            await backend.manager.health_ping(0.01)

    run(tokenizer, scenario, watched.watch)


def test_a_request_is_not_sent_if_a_process_is_stopped_while_its_text_is_encoded(
    tokenizer: Tokenizer, watched: WatchedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = tokenizer.encode

    def held(text: str, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        go_on.wait(10)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", held)

    async def scenario(backend: Backend) -> None:
        request = asyncio.create_task(answer_of(backend, text=["hello " * 100] * 40))
        await asyncio.to_thread(begun.wait)
        watched.set_state(SCHEDULER, "T")
        go_on.set()
        with pytest.raises(ServiceError, match=STOPPED):
            await request
        assert not backend.sent

    run(tokenizer, scenario, watched.watch)
