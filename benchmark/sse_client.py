"""A client of streamed answers that costs little: it counts events and reads only the last one.

The answer of a request with `"stream": true` to `/generate` or a route of OpenAI's API is
server-sent events, `data: {json}` and an empty line, the last of them `data: [DONE]`. JSON holds no
line break, so two of them in a row end an event and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

EVENT_END = b"\n\n"
ANSWER_END = b"0\r\n\r\n"  # the last chunk of a chunked body
DONE = b"data: [DONE]"


class StreamError(RuntimeError):
    """An answer that is none, or not whole."""


@dataclass(frozen=True)
class StreamedAnswer:
    """One request as its client saw it.

    Attributes:
        sent_s: `time.perf_counter` when it was sent.
        events_s: when each event came, without the last.
        last: the content of the last event that has any.
    """

    sent_s: float
    events_s: list[float]
    last: dict[str, Any]

    @property
    def first_token_s(self) -> float:
        return self.events_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one event and the next; 0 for those that came in one piece."""
        return [after - before for before, after in zip(self.events_s, self.events_s[1:])]


class StreamClient(asyncio.Protocol):
    """One connection, for one request after the other.

    Attributes:
        num_events: that came so far, the last of each answer too.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self._transport: asyncio.WriteTransport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._events_s: list[float] = []
        self._tail = b""

    @classmethod
    async def connect(cls, port: int) -> StreamClient:
        """To a server of this machine."""
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    async def generate(self, body: bytes) -> StreamedAnswer:
        """`stream` of a body of `/generate`."""
        return await self.stream("/generate", body, "meta_info")

    async def stream(self, path: str, body: bytes, last_field: str) -> StreamedAnswer:
        """Sends a body and waits for the whole answer.

        Args:
            last_field: that the last event of a whole answer has.

        Raises:
            StreamError: if it is refused, fails or ends early.
        """
        assert self._transport is not None
        self._parts, self._events_s, self._tail = [], [], b""
        self._ended = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        sent_s = time.perf_counter()
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._ended
        last = last_event(b"".join(self._parts), last_field)
        return StreamedAnswer(sent_s, self._events_s[:-1], last)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    # ---------------------------------------------------------------- of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._ended is None or self._ended.done():
            return
        if not self._parts and not data.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(StreamError(data[:500].decode(errors="replace")))
            return
        self._parts.append(data)
        num_events = (self._tail[-1:] + data).count(EVENT_END)
        self.num_events += num_events
        self._events_s += [now] * num_events
        self._tail = (self._tail + data)[-len(ANSWER_END) :]
        if self._tail == ANSWER_END:
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(StreamError(f"The server closed the connection: {error}."))


def last_event(answer: bytes, field: str = "meta_info") -> dict[str, Any]:
    """The content of the event before `[DONE]`, which has a field.

    Raises:
        StreamError: if there is none, it is broken, or it reports an error.
    """
    before, done, _ = answer.rpartition(DONE)
    text = before.rpartition(b"data: {")[2].partition(EVENT_END)[0]
    try:
        found: dict[str, Any] = json.loads(b"{" + text) if done else {}
    except ValueError:
        found = {}
    if field not in found:
        raise StreamError(f"An answer has no last event: {answer[-200:]!r}.")
    return found
