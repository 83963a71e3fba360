"""Streams past what wraps `send`: the same bytes, and the wrappers still see how they start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints import http_io
from sglang.srt.entrypoints.http_io import EventStream, OutermostApp
from sglang.srt.frontend.errors import ServiceError

CHUNKS = [{"text": "a", "n": 1}, {"text": "é\n", "n": 2}, {"text": "b", "n": 3}]
SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "headers": [],
}


class Wrapper:
    """A middleware that notes what passes through its `send`, and adds a header."""

    def __init__(self, app: ASGIApp, seen: list[str]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            self._seen.append(message["type"])
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-seen", b"yes")]}
            await send(message)

        await self._app(scope, receive, noting)


def answer_of(fails: bool, is_direct: bool) -> tuple[list[Message], list[str]]:
    """Returns what a web server gets of a stream, and what the middleware saw of it."""
    seen: list[str] = []
    app = FastAPI()
    app.add_middleware(Wrapper, seen=seen)

    async def chunks() -> AsyncGenerator[Any, None]:
        for chunk in CHUNKS[1:]:
            yield chunk
        if fails:
            raise ServiceError("The server is shutting down.", 503)

    @app.get("/")
    async def stream() -> EventStream:
        return EventStream(CHUNKS[0], chunks())

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        outermost = OutermostApp(app, lambda: "", 256) if is_direct else app
        scope = {**SCOPE, "headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""}
        await outermost(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(run(), 10))
    return sent, seen


@pytest.mark.parametrize("fails", [False, True])
def test_a_direct_stream_is_the_same_for_its_client(fails: bool) -> None:
    direct, _ = answer_of(fails, is_direct=True)
    wrapped, _ = answer_of(fails, is_direct=False)
    assert direct[0]["headers"].pop()[0] == b"x-request-id"
    assert direct == wrapped
    events = b"".join(message.get("body", b"") for message in direct)
    assert events.count(b"\n\n") == len(CHUNKS) + fails + 1
    assert events.endswith(b"data: [DONE]\n\n")


def test_middlewares_see_the_start_of_a_direct_stream_and_no_event() -> None:
    sent, seen = answer_of(fails=False, is_direct=True)
    assert (b"x-seen", b"yes") in sent[0]["headers"]
    assert seen == ["http.response.start"]
    assert len(sent) == 1 + len(CHUNKS) + 1


@pytest.mark.parametrize("has_started", [False, True])
def test_request_that_the_web_server_cancels_is_answered_unless_it_has_been(
    has_started: bool,
) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        outermost = OutermostApp(app, lambda: "The scheduler process ended with signal 9.", 256)
        request = asyncio.create_task(outermost(dict(SCOPE), asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert request.cancelled() == has_started

    asyncio.run(run())
    assert sent[0]["status"] == (200 if has_started else 503)
    assert len(sent) == (1 if has_started else 2)
    assert has_started or b"signal 9" in sent[1]["body"]


def test_a_stream_of_chunks_that_take_long_to_write_leaves_the_thread_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs on a clock of the test's own, on which writing alone takes time: most of it is
    others'."""
    now_s, written_s, paused_s = 0.0, 0.0, 0.0
    encode, sleep = http_io._encode, asyncio.sleep

    def slow_encode(content: Any) -> bytes:
        nonlocal now_s, written_s
        now_s, written_s = now_s + 0.02, written_s + 0.02
        return encode(content)

    async def note(seconds: float) -> None:
        nonlocal paused_s
        paused_s += seconds
        await sleep(0)

    monkeypatch.setattr(http_io, "_encode", slow_encode)
    monkeypatch.setattr(http_io.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(http_io.asyncio, "sleep", note)
    sent, _ = answer_of(fails=False, is_direct=True)
    assert len(sent) == 1 + len(CHUNKS) + 1
    assert paused_s == pytest.approx(10 * 0.02 * (len(CHUNKS) - 1))
    assert written_s < 0.2 * (written_s + paused_s)
