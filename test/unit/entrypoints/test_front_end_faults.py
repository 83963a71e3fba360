"""The front end under load and when something in it fails: each hurts no more than it must."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest

from fake_backend import FULL, LENGTH, LIMITS, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.frontend.generate_call import Sample
from sglang.srt.messages.control import EngineStatus, HealthPing
from sglang.srt.messages.requests import (
    BatchStrOutput,
    FinishReason,
    PositionLogprobs,
    ReqTextOutput,
)
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

BATCH = ["hello " * 100] * 40  # each text is short, all together are long
NAMED = {f"prompt[{index}]": text for index, text in enumerate(BATCH)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


class EncodeSpy:
    """Records the threads that encode; `first` is set once one does."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.first = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", self)

    def __call__(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        self.first.set()
        self.go_on.wait(10)
        return self._encode(text, add_special_tokens)


# ---------------------------------------------------------------- the loop stays free


@pytest.mark.parametrize("route", ["generate", "tokenize"])
def test_long_batch_of_short_texts_is_encoded_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    spy = EncodeSpy(tokenizer, monkeypatch)

    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        manager.limits = dataclasses.replace(LIMITS, max_req_len=10_000)
        if route == "tokenize":
            ids = await manager.encode(NAMED)
        else:
            task = asyncio.create_task(answer_of(backend, text=BATCH))
            await backend.wait_sent(len(BATCH))
            ids = [request.input_ids for request in backend.requests]
            for request in backend.requests:
                backend.put(request.req_id, "x", (1,), LENGTH)
            await task
        assert ids == [spy._encode(text) for text in BATCH]
        assert threading.get_ident() not in spy.threads
        await manager.encode({"prompt": "short"})
        assert spy.threads[-1] == threading.get_ident()

    run(tokenizer, scenario)


def test_client_that_leaves_ends_the_encoding_of_its_batch(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = EncodeSpy(tokenizer, monkeypatch)
    spy.go_on.clear()

    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(backend.manager.encode(NAMED))
        await asyncio.to_thread(spy.first.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        spy.go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert len(spy.threads) < len(BATCH)

    run(tokenizer, scenario)


def test_text_of_a_token_is_decoded_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    token_text = tokenizer.token_text

    def spy(token_id: int) -> str:
        decoded.append(token_id)
        return token_text(token_id)

    monkeypatch.setattr(tokenizer, "token_text", spy)

    async def scenario(backend: Backend) -> None:
        wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
        task = asyncio.create_task(answer_of(backend, input_ids=[5], **wanted))
        await backend.wait_sent(1)
        position = PositionLogprobs(7, -1.0, top_logprobs=[-1.0, -2.0], top_ids=[7, 8])
        output = ReqTextOutput(0, "x", [7] * 9, LENGTH, 1, 9, 0, 0, output_logprobs=[position] * 9)
        backend.inbox.put_nowait(BatchStrOutput(outputs=[output]))
        meta = (await task)["meta_info"]
        assert meta["output_top_logprobs"][8][1] == [-2.0, 8, token_text(8)]
        assert sorted(decoded) == [5, 7, 8]

    run(tokenizer, scenario)


def test_requests_that_do_not_stream_report_now_and_then(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        params = {"stream_interval": 3}
        tasks = [
            asyncio.create_task(answer_of(backend, text="a", stream=stream, sampling_params=params))
            for stream in (True, False)
        ]
        await backend.wait_sent(2)
        intervals = [request.sampling_params.stream_interval for request in backend.requests]
        assert intervals == [3, 50]
        assert [request.streams for request in backend.requests] == [True, False]
        for request in backend.requests:
            backend.put(request.req_id, "x", (1,))
            backend.put(request.req_id, "y", (2,), LENGTH)
        assert (await tasks[1])["text"] == "xy"
        await tasks[0]

    run(tokenizer, scenario)


# ---------------------------------------------------------------- health


def test_busy_server_is_healthy_as_soon_as_any_request_has_output(tokenizer: Tokenizer) -> None:
    """The probe waits in the queue, or is refused by a full one, while another request runs."""

    async def scenario(backend: Backend) -> None:
        busy = asyncio.create_task(answer_of(backend, text="a"))
        await backend.wait_sent(1)
        for is_full in (False, True):
            count = len(backend.sent) + 1
            health = asyncio.create_task(backend.manager.health_generate(10))
            await backend.wait_sent(count)
            probe = backend.requests[-1].req_id
            if is_full:
                backend.put(probe, reason=FULL)
                await asyncio.sleep(0.01)
                assert not health.done()
            backend.put(0, "x", (1,))
            await health
            assert is_full or backend.aborted == [probe]
        backend.put(0, "", (), LENGTH)
        await busy

    run(tokenizer, scenario)


def test_probe_of_an_idle_server_is_enough(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        health = asyncio.create_task(backend.manager.health_generate(10))
        await backend.wait_sent(1)
        backend.put(0, "x", (1,), LENGTH)
        await health
        assert not backend.aborted

    run(tokenizer, scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_paused_server_is_healthy_if_its_processes_answer(
    tokenizer: Tokenizer, is_late: bool
) -> None:
    """Also if the pause comes after the probe, which then gets no token."""

    async def scenario(backend: Backend) -> None:
        paused = EngineStatus(stopped="Generation is paused.")
        if not is_late:
            backend.manager.handle(paused)
        health = asyncio.create_task(backend.manager.health_generate(0.2))
        await backend.wait_sent(1)
        if is_late:
            backend.manager.handle(paused)
        while not (pings := [m for m in backend.sent if isinstance(m, HealthPing)]):
            await asyncio.sleep(0.01)
        backend.inbox.put_nowait(pings[0])
        await health
        assert len(backend.requests) == is_late

    run(tokenizer, scenario)


def test_server_without_output_is_not_healthy(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        with pytest.raises(ServiceError, match="No token"):
            await manager.health_generate(0.01)
        refused = asyncio.create_task(manager.health_generate(0.05))
        await backend.wait_sent(3)
        backend.put(1, reason=FULL)
        with pytest.raises(ServiceError, match="No token"):
            await refused
        failed = asyncio.create_task(manager.health_generate(10))
        await backend.wait_sent(4)
        backend.put(2, reason=FinishReason(type="abort", message="nan", status_code=500))
        with pytest.raises(ServiceError, match="nan"):
            await failed
        dying = asyncio.create_task(manager.health_generate(10))
        await backend.wait_sent(5)
        manager.fail_all("The scheduler is dead.")
        with pytest.raises(ServiceError, match="dead"):
            await dying

    run(tokenizer, scenario)


def test_probe_is_not_logged_and_asks_for_nothing_that_the_server_prefers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log = RequestLog(str(tmp_path / "log"), 0)

    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        preferred = {"min_new_tokens": 10, "n": 3}
        manager.limits = dataclasses.replace(LIMITS, preferred_sampling_params=preferred)
        manager._request_log = log
        health = asyncio.create_task(manager.health_generate(10))
        await backend.wait_sent(1)
        (probe,) = backend.requests
        assert probe.sampling_params.min_new_tokens == 0
        backend.put(probe.req_id, "x", (1,), LENGTH)
        await health

    run(tokenizer, scenario)
    log.close()
    assert (tmp_path / "log").read_text() == ""


# ---------------------------------------------------------------- one sample, one batch


def test_output_that_cannot_be_taken_in_ends_its_sample_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Sample.add

    def broken_add(self: Sample, output: ReqTextOutput) -> None:
        if output.text == "bad":
            raise ValueError("broken")
        add(self, output)

    monkeypatch.setattr(Sample, "add", broken_add)

    async def scenario(backend: Backend) -> None:
        batch = asyncio.create_task(answer_of(backend, text=["a", "b"]))
        single = asyncio.create_task(answer_of(backend, text="c"))
        await backend.wait_sent(3)
        backend.put(0, "bad", (1,))
        backend.put(2, "bad", (1,), LENGTH)
        backend.put(1, "fine", (1,), LENGTH)
        first, second = await batch
        assert first["meta_info"]["finish_reason"]["status_code"] == 500
        assert second["text"] == "fine"
        with pytest.raises(ServiceError, match="log") as error:
            await single
        assert error.value.status_code == 500
        assert 0 in backend.aborted
        assert backend.manager._idle.is_set()

    run(tokenizer, scenario)


def test_batch_refused_for_a_later_prompt_leaves_no_trace(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log = RequestLog(str(tmp_path / "log"), 0)

    async def scenario(backend: Backend) -> None:
        backend.manager._request_log = log
        wanted = {"return_logprob": True, "logprob_start_len": [0, 3]}
        with pytest.raises(RequestError, match="logprob_start_len"):
            await answer_of(backend, input_ids=[[5, 6], [5, 6]], **wanted)
        assert not backend.sent

    run(tokenizer, scenario)
    log.close()
    assert (tmp_path / "log").read_text() == ""
