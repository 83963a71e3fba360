"""Aborts of requests whose prompts are still being tokenized."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fake_backend import LENGTH, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.messages.control import EngineStatus
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

LONG = "hello " * 3000  # so long that a thread encodes it; it then has one token here


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


class HeldEncoding:
    """Encodes every text to one token, once the test lets it."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(tokenizer, "min_num_tokens", lambda text: 1)
        monkeypatch.setattr(tokenizer, "encode", self._encode)

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._begun.set()
        self._go_on.wait(10)
        return [7]

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """A block within which some text is being encoded."""
        await asyncio.to_thread(self._begun.wait, 10)
        yield
        self._go_on.set()


@pytest.fixture
def encoding(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> HeldEncoding:
    return HeldEncoding(tokenizer, monkeypatch)


def reason_of(answer: dict[str, Any]) -> dict[str, Any]:
    reason: dict[str, Any] = answer["meta_info"]["finish_reason"]
    return reason


def test_abort_of_all_ends_a_batch_that_is_never_sent(
    tokenizer: Tokenizer, encoding: HeldEncoding, tmp_path: Path
) -> None:
    log = RequestLog(str(tmp_path / "log"), 0)

    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        manager._request_log = log
        manager.handle(EngineStatus(weight_version="v2"))
        task = asyncio.create_task(
            answer_of(backend, text=[LONG] * 2, sampling_params={"n": 2}, return_logprob=True)
        )
        async with encoding.held():
            assert manager.abort_request(abort_all=True, message="stop it") == 4
        answers = await task
        assert len(answers) == 4
        for answer in answers:
            meta = answer["meta_info"]
            assert reason_of(answer) == {"type": "abort", "message": "stop it"}
            assert (answer["text"], answer["output_ids"]) == ("", [])
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, 0)
            assert meta["output_token_logprobs"] == []
            assert meta["weight_version"] == "v2"
            assert meta["weight_versions"] == [{"version": "v2", "start": 0, "end": 0}]
        assert not backend.sent
        assert manager._idle.is_set()

    run(tokenizer, scenario)
    log.close()
    assert (tmp_path / "log").read_text().count('"abort"') == 4


@pytest.mark.parametrize(
    ("selector", "ended"),
    [
        ({"rid": "job-1"}, {"job-1"}),
        ({"rid": "job-1", "prefix": True}, {"job-1", "job-10"}),
        ({"rid": "none"}, set()),
        ({"rid": ""}, set()),
    ],
)
def test_abort_ends_exactly_those_that_it_names(
    tokenizer: Tokenizer, encoding: HeldEncoding, selector: dict[str, Any], ended: set[str]
) -> None:
    names = ["job-1", "job-10", "other"]

    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=[LONG] * 3, rid=names))
        async with encoding.held():
            assert backend.manager.abort_request(**selector) == len(ended)
        await backend.wait_sent(len(names) - len(ended))
        assert {request.rid for request in backend.requests} == set(names) - ended
        for request in backend.requests:
            backend.put(request.req_id, "x", (1,), LENGTH)
        answers = await task
        assert [answer["meta_info"]["id"] for answer in answers] == names
        ends = {a["meta_info"]["id"] for a in answers if reason_of(a)["type"] == "abort"}
        assert ends == ended
        assert len(backend.sent) == len(names) - len(ended)

    run(tokenizer, scenario)


def test_stream_ends_with_one_chunk_per_aborted_sample(
    tokenizer: Tokenizer, encoding: HeldEncoding
) -> None:
    async def scenario(backend: Backend) -> None:
        async def read() -> list[Any]:
            body = {"text": [LONG, LONG], "stream": True}
            return [chunk async for chunk in backend.manager.generate_request(body)]

        task = asyncio.create_task(read())
        async with encoding.held():
            assert backend.manager.abort_request(abort_all=True) == 2
        chunks = await task
        assert [chunk["index"] for chunk in chunks] == [0, 1]
        assert {reason_of(chunk)["message"] for chunk in chunks} == {"The request was aborted."}
        assert not backend.sent

    run(tokenizer, scenario)


def test_first_message_stays_and_tokenized_calls_are_forgotten(
    tokenizer: Tokenizer, encoding: HeldEncoding
) -> None:
    async def scenario(backend: Backend) -> None:
        manager = backend.manager
        task = asyncio.create_task(answer_of(backend, text=LONG, rid="a"))
        async with encoding.held():
            assert manager.abort_request("a", message="first") == 1
            assert manager.abort_request("a", message="second") == 1
        assert reason_of(await task)["message"] == "first"
        assert manager.abort_request(abort_all=True) == 0
        again = asyncio.create_task(answer_of(backend, text=LONG, rid="a"))
        await backend.wait_sent(1)
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        assert (await again)["text"] == "x"

    run(tokenizer, scenario)


def test_client_that_leaves_while_its_text_is_encoded_leaves_nothing(
    tokenizer: Tokenizer, encoding: HeldEncoding
) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=LONG))
        async with encoding.held():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert backend.manager.abort_request(abort_all=True) == 0
        assert not backend.sent

    run(tokenizer, scenario)


def test_shutdown_refuses_what_is_still_being_encoded(
    tokenizer: Tokenizer, encoding: HeldEncoding
) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=LONG))
        async with encoding.held():
            await backend.manager.drain(1000, asyncio.Event())
        with pytest.raises(ServiceError, match="shutting down"):
            await task
        assert not backend.sent

    run(tokenizer, scenario)
