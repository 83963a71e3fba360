"""Limits of connections: how many there are, how large the head of a request is and how long it
takes, and that no one takes in the rest of a body whose answer is there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sglang.srt.entrypoints.http_io import error_response
from sglang.srt.request_id import HEADER, new_id

KEPT_BYTES = 65_536  # of a body that is not read: so few are taken in for the next request
HEAD_SECONDS = 60.0  # for a client to send the head of a request
END_OF_HEAD = b"\r\n\r\n"
HEADERS_TOO_LARGE = "The head of the request is larger than {} bytes (--max-header-bytes)."
TOO_MANY_CONNECTIONS = (
    "The server has {} connections, and takes no more at a time (--max-connections). Try again"
    " later, or send several requests over one connection."
)

_Protocol: Any = AutoHTTPProtocol


class LimitedProtocol(_Protocol):
    """Uvicorn's protocol of one connection, with the limits that its configuration has:
    `limit_concurrency` connections, and `h11_max_incomplete_event_size` bytes of a request's head.
    """

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(config=config, **settings)
        self.limit_concurrency = None  # of requests too, and answered without a word
        self._max_connections: float = config.limit_concurrency or math.inf
        self._max_head_bytes: float = config.h11_max_incomplete_event_size or math.inf
        self._num_head_bytes = 0  # of a request whose head has not ended
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(503, TOO_MANY_CONNECTIONS.format(self._max_connections))
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if before is not None and (before.more_body or not before.response_complete):
            super().data_received(data)
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self._max_head_bytes and END_OF_HEAD not in data:
            self._refuse(431, HEADERS_TOO_LARGE.format(self._max_head_bytes))
            return
        super().data_received(data)
        if self.cycle is not before:
            self._num_head_bytes = 0
            self._stop_timer()
        elif self._timer is None:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status_code: int, message: str) -> None:
        """Answers without a request, and closes the connection."""
        headers = {"connection": "close", HEADER.decode(): new_id()}
        response = error_response(message, status_code, headers=headers)
        lines = [f"HTTP/1.1 {status_code} {HTTPStatus(status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join(lines) + END_OF_HEAD + bytes(response.body))
        self.transport.close()


class LimitedRequests:
    """Refuses a request whose head is too large. An answer that comes before a large body has been
    read closes the connection after it."""

    def __init__(self, app: ASGIApp, max_head_bytes: int) -> None:
        self._app = app
        self._max_head_bytes = max_head_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._app
        if _num_head_bytes(scope) > self._max_head_bytes:
            app = error_response(HEADERS_TOO_LARGE.format(self._max_head_bytes), 431)
        if not _may_have_large_body(scope["headers"]):
            await app(scope, receive, send)
            return
        is_read = False

        async def receive_body() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive_body, send_start)


def _num_head_bytes(scope: Scope) -> int:
    size = len(scope["path"]) + len(scope["query_string"])
    return size + sum(len(name) + len(value) for name, value in scope["headers"])


def _may_have_large_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            return not value.isdigit() or int(value) > KEPT_BYTES
    return False
