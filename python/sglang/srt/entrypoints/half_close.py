"""Clients that close their side after sending still get their answer; those that left are noticed.

The end of a client's data says both: "that was my request", of a client that half-closes, and "I am
gone". Only the answer to something that is sent tells them apart, so now and then, less and less
often, such a client gets what its protocol lets it ignore: an interim response before the answer
begins, a comment between the events of a stream. A client that has left refuses it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from sglang.srt.entrypoints.connection_limits import LimitedProtocol
from sglang.srt.entrypoints.http_io import EVENT_STREAM

FIRST_PROBE_S, LONGEST_PROBE_S = 0.5, 30.0
REFUSAL_S = 0.1  # by then a client that is near has refused
INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT_CHUNK = b"3\r\n:\n\n\r\n"


class HalfCloseProtocol(asyncio.Protocol):
    """Uvicorn's protocol of one connection, which stays open for an answer that is owed.

    Args:
        settings: what uvicorn makes its own protocol of.
    """

    def __init__(self, **settings: Any) -> None:
        self._http: Any = LimitedProtocol(**settings)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> bool:
        """Keeps the connection open if the request is complete, and its answer is not."""
        cycle = self._http.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False  # nothing else can come
        self._probe_after(FIRST_PROBE_S)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._http.connection_lost(error)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _probe_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._probe, seconds)

    def _probe(self, waited_s: float) -> None:
        if (transport := self._transport_if_taken()) is None:
            return
        if not vars(self._http).get("pipeline"):  # httptools: an earlier answer may be under way
            transport.write(_what_it_ignores(self._http.cycle))
        asyncio.get_running_loop().call_later(REFUSAL_S, self._transport_if_taken)
        self._probe_after(min(2 * waited_s, LONGEST_PROBE_S))

    def _transport_if_taken(self) -> asyncio.Transport | None:
        """The open transport; aborted, and None, if the client has refused what was sent."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return None
        connection = transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return None
        return transport


def _what_it_ignores(cycle: Any) -> bytes:
    """Returns what may be sent now without a change of the answer; nothing, if nothing may."""
    if cycle.scope["http_version"] != "1.1":
        return b""
    if not cycle.response_started:
        return INTERIM_RESPONSE
    return COMMENT_CHUNK if EVENT_STREAM in cycle.scope else b""
