"""Limits of connections, over sockets: their number, heads of requests, bodies nobody reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints import connection_limits
from sglang.srt.entrypoints.connection_limits import LimitedProtocol, LimitedRequests
from sglang.srt.entrypoints.http_io import error_response, response_of_error

MAX_CONNECTIONS, MAX_HEAD_BYTES = 3, 2000
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body of `/read`, and answers 401 to all else."""
    response = error_response("No.", 401)
    if scope["path"] == "/read":
        try:
            response = Response(str(len(await Request(scope, receive).body())))
        except Exception as error:  # noqa: BLE001 - the client has left
            response = response_of_error(error)
    await response(scope, receive, send)


def serve(scenario: Callable[[Callable[[], Awaitable[Opened]]], Awaitable[None]]) -> None:
    """Runs a scenario, which opens connections, beside a server with small limits."""

    async def run() -> None:
        config = uvicorn.Config(
            LimitedRequests(app, MAX_HEAD_BYTES),
            port=0,
            http=LimitedProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_level="error",
            lifespan="off",
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(scenario(lambda: asyncio.open_connection("127.0.0.1", port)), 20)
        finally:
            await server.shutdown()

    asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def message_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


@pytest.mark.parametrize(
    "head",
    [
        [b"GET / HTTP/1.1\r\nx: ", *[b"a" * 500] * 5],
        [b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 2000 + b"\r\n\r\n"],
        [b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"],
        [GET, b"GET / HTTP/1.1\r\nx: ", *[b"a" * 500] * 5],
    ],
    ids=["without end", "headers", "URL", "of the second request"],
)
def test_a_head_that_is_too_large_gets_431(head: list[bytes]) -> None:
    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        reader, writer = await open_one()
        for part in head:
            writer.write(part)
            await writer.drain()
            if part == GET:
                assert (await answer(reader))[0] == 401
        status, _, body = await answer(reader)
        assert (status, "--max-header-bytes" in message_of(body)) == (431, True)
        writer.close()

    serve(scenario)


def test_one_connection_too_many_gets_503_and_the_others_go_on() -> None:
    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        kept = [await open_one() for _ in range(MAX_CONNECTIONS)]
        for _ in range(2):
            reader, writer = await open_one()
            status, headers, body = await answer(reader)
            assert (status, "--max-connections" in message_of(body)) == (503, True)
            assert headers["connection"] == "close"
            assert headers["retry-after"]
            assert await reader.read() == b""
            writer.close()
        for reader, writer in kept:
            writer.write(GET)
            assert (await answer(reader))[0] == 401
        kept.pop()[1].close()
        while True:  # the server must see that it has gone
            reader, writer = await open_one()
            writer.write(GET)
            if (await answer(reader))[0] == 401:
                break

    serve(scenario)


def test_a_client_that_sends_no_head_is_cut_and_one_that_waits_for_an_answer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_SECONDS", 0.1)

    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        silent, slow = await open_one(), await open_one()
        silent[1].write(GET[:9])
        slow[1].write(b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n1")
        assert await silent[0].read() == b""
        await asyncio.sleep(0.15)
        slow[1].write(b"2")
        assert (await answer(slow[0]))[2] == b"2"

    serve(scenario)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_behind_a_refusal_is_not_read(is_chunked: bool) -> None:
    """The rest of 100 MB stays with the client: the connection ends."""
    num_bytes, part = 100_000_000, b"x" * 100_000

    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        reader, writer = await open_one()
        size = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % num_bytes
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\n" + size + b"\r\n\r\n")
        if is_chunked:
            writer.write(b"%x\r\n" % num_bytes)
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (401, "close")
        sent: list[int] = []

        async def send_all() -> None:
            while sum(sent) < num_bytes:
                writer.write(part)
                sent.append(len(part))
                await writer.drain()
                await asyncio.sleep(0)

        with pytest.raises(ConnectionError):
            await send_all()
        assert sum(sent) < num_bytes / 5

    serve(scenario)


@pytest.mark.parametrize(("path", "num_bytes"), [("/", 1000), ("/read", 200_000)])
def test_a_connection_lives_on_behind_a_small_body_and_one_that_was_read(
    path: str, num_bytes: int
) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {num_bytes}\r\n\r\n".encode()

    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        reader, writer = await open_one()
        for _ in range(2):
            writer.write(head + b"x" * num_bytes)
            status, headers, body = await answer(reader)
            assert "connection" not in headers
            assert (status, body) == (200, str(num_bytes).encode()) or status == 401

    serve(scenario)


def test_a_body_behind_an_early_answer_is_no_head_of_another_request() -> None:
    """A small one is taken in, bit by bit, and then the next request."""

    async def scenario(open_one: Callable[[], Awaitable[Opened]]) -> None:
        reader, writer = await open_one()
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\n\r\n")
        assert (await answer(reader))[0] == 401
        for _ in range(10):
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(GET)
        assert (await answer(reader))[0] == 401

    serve(scenario)


def test_what_is_no_http_request_passes() -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    call: Any = ({"type": "lifespan"}, seen, app)
    asyncio.run(LimitedRequests(inner, 1)(*call))
    assert seen == [call]
