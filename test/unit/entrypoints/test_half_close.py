"""Half-closed clients get the answer that others get; clients that left end their requests."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from serving_utils import wait_until
from sglang.srt.entrypoints import half_close
from sglang.srt.entrypoints.half_close import HalfCloseProtocol
from sglang.srt.entrypoints.http_io import EventStream, json_response, unless_client_leaves

BODY = b'{"text": "hello"}'
EVENTS = b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'


class App:
    """Answers when a test lets it: JSON at /json, at /stream two events, the second one then."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_begun = 0
        self.num_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            raw = await request.body()
            self.num_begun += 1
            if scope["path"] == "/stream":
                await EventStream({"n": 1}, self._chunks())(scope, receive, send)
                return
            await unless_client_leaves(receive, self._may_go_on())
            await json_response({"bytes": len(raw)})(scope, receive, send)
        except ClientDisconnect:
            self.num_left += 1

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        try:
            await self._may_go_on()
        except BaseException:
            self.num_left += 1
            raise
        yield {"n": 2}

    async def _may_go_on(self) -> None:
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)


class Served:
    """An application behind a real web server."""

    def __init__(self) -> None:
        self.app = App()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.address = listener.getsockname()
        config = uvicorn.Config(self.app, http=HalfCloseProtocol, lifespan="off", log_config=None)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def send(self, path: str, missing: int = 0) -> socket.socket:
        """A client that has sent its request, but for the last bytes."""
        client = socket.create_connection(self.address, timeout=10)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
        client.sendall(head.encode() + BODY[: len(BODY) - missing])
        return client

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served()
    yield served
    served.app.go_on.set()
    served.close()


@pytest.fixture
def served(server: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(half_close, "FIRST_PROBE_S", 0.02)
    server.app.go_on.clear()
    server.app.num_begun = server.app.num_left = 0
    return server


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer, after which the server closes the connection."""
    response = http.client.HTTPResponse(client)
    response.begin()
    body = response.read()
    assert client.recv(1) == b""
    return response.status, body


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["at once", "late"])
def test_half_closed_client_gets_its_answer(served: Served, seconds: float) -> None:
    with served.send("/json") as client:
        client.shutdown(socket.SHUT_WR)
        threading.Timer(seconds, served.app.go_on.set).start()
        assert answer_of(client) == (200, b'{"bytes":17}')
    assert served.app.num_left == 0


def test_half_closed_client_gets_the_events_of_a_quiet_stream(served: Served) -> None:
    with served.send("/stream") as client:
        client.shutdown(socket.SHUT_WR)
        threading.Timer(0.2, served.app.go_on.set).start()
        status, body = answer_of(client)
    assert status == 200
    assert b":\n\n" in body  # the comments by which it is asked if it is there
    assert body.replace(b":\n\n", b"") == EVENTS
    assert served.app.num_left == 0


def test_half_close_in_the_middle_of_a_stream_loses_nothing(served: Served) -> None:
    with served.send("/stream") as client:
        wait_until(lambda: served.app.num_begun == 1)
        client.shutdown(socket.SHUT_WR)
        served.app.go_on.set()
        assert answer_of(client) == (200, EVENTS)


@pytest.mark.parametrize("path", ["/json", "/stream"])
def test_client_that_leaves_ends_its_request(served: Served, path: str) -> None:
    with served.send(path) as client:
        wait_until(lambda: served.app.num_begun == 1)
        if path == "/stream":
            while not client.recv(4096).endswith(b"\n\n\r\n"):  # what is unread would tell at once
                continue
    wait_until(lambda: served.app.num_left == 1, timeout_s=3)


def test_half_closed_client_that_leaves_later_ends_its_request(served: Served) -> None:
    with served.send("/json") as client:
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: served.app.num_begun == 1)
        assert client.recv(4096) == half_close.INTERIM_RESPONSE
        assert served.app.num_left == 0
    wait_until(lambda: served.app.num_left == 1, timeout_s=3)


def test_request_that_ends_in_the_middle_is_one_of_a_client_that_left(served: Served) -> None:
    with served.send("/json", missing=1) as client:
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    wait_until(lambda: served.app.num_left == 1, timeout_s=3)
