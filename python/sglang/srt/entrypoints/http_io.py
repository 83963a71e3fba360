"""HTTP plumbing that no route should repeat: bodies with a limit, errors, streams, disconnects."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.offered_routes import (
    methods_of,
    no_route_message,
    wrong_method_message,
)
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.request_id import CURRENT, HEADER, RequestId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    431: "RequestHeadersTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
RETRY_AFTER_S = 1
SMALL_PARTS = 10_000  # this many numbers become JSON in less than a millisecond
LONG_EVENT_S = 0.001  # to write an event of a stream
PAUSE_RATIO = 10  # after such an event its stream waits this many times as long
CLIENT_GONE_STATUS = 499  # in the access log only: no client is there to read it
EVENT_STREAM = "sglang.event_stream"  # in a scope: the response is one
DIRECT_SEND = "sglang.direct_send"  # in a scope: the web server's own `send`


def json_response(content: Any, status_code: int = 200) -> Response:
    """`content` as JSON."""
    return Response(_encode(content), status_code, media_type="application/json")


async def answer_response(request: Request, answer: Any) -> Response:
    """An answer as JSON. A large one is written in a thread, bit by bit, so that others run between
    two of its parts.

    Raises:
        ClientDisconnect: if the client leaves meanwhile.
    """
    if _num_parts(answer, SMALL_PARTS) < SMALL_PARTS:
        return json_response(answer)
    parts: list[bytes] = []
    has_left = threading.Event()

    def write() -> None:
        for part in _json_parts(answer):
            if has_left.is_set():
                return
            parts.append(part)

    try:
        await unless_client_leaves(request.receive, asyncio.to_thread(write))
    finally:
        has_left.set()
    return Response(b"".join(parts), media_type="application/json")


def _num_parts(value: Any, most: int) -> int:
    """Counts the values in a value, no further than `most`."""
    if not isinstance(value, list | dict):
        return 1
    count = len(value)
    for item in value.values() if isinstance(value, dict) else value:
        if count >= most:
            break
        if isinstance(item, list | dict):
            count += _num_parts(item, most - count)
    return count


def _json_parts(value: Any) -> Iterator[bytes]:
    """The JSON of a value in parts of SMALL_PARTS values or fewer."""
    if _num_parts(value, SMALL_PARTS) < SMALL_PARTS or not value:
        yield _encode(value)
    elif isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            yield (b"," if index else b"{") + _encode(name) + b":"
            yield from _json_parts(item)
        yield b"}"
    elif any(isinstance(item, list | dict) for item in value):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _json_parts(item)
        yield b"]"
    else:
        for start in range(0, len(value), SMALL_PARTS):
            yield (b"," if start else b"[") + _encode(value[start : start + SMALL_PARTS])[1:-1]
        yield b"]"


def error_body(
    message: str, status_code: int, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Makes the body of every error; `code` is the status code unless there is another. Of 503,
    which routers read, it has SGLang's own form beside."""
    kind = ERROR_TYPES.get(status_code, "Error")
    error = {"message": message, "type": kind, "param": field, "code": code or status_code}
    return {"error": error} if status_code != 503 else {"object": "error", **error, "error": error}


def error_response(
    message: str,
    status_code: int,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
) -> Response:
    """An error as a response; 503 says when to try again."""
    response = json_response(error_body(message, status_code, field, code), status_code)
    response.headers.update(headers or {})
    if status_code == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def response_of_error(error: Exception) -> Response:
    """The response that an error of the layers below is."""
    if isinstance(error, RequestError):
        return error_response(error.message, error.status_code, error.field, code=error.code)
    if isinstance(error, ServiceError):
        return error_response(error.message, error.status_code)
    if isinstance(error, HTTPException):
        return error_response(str(error.detail), error.status_code, headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE_STATUS)
    return error_response("The server failed on this request; its log says why.", 500)


def update_failure(error: RequestError | ServiceError) -> Response:
    """The response of a weight update that failed: clients of SGLang read `success`."""
    field = error.field if isinstance(error, RequestError) else None
    body = error_body(error.message, error.status_code, field)
    response = json_response({"success": False, "message": error.message, **body})
    response.status_code = error.status_code
    if error.status_code == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of a route a JSON answer."""

    async def handle(request: Request, error: Exception) -> Response:
        return response_of_error(error)

    async def handle_no_route(request: Request, error: Exception) -> Response:
        return error_response(no_route_message(request.scope["path"], app.routes), 404)

    async def handle_wrong_method(request: Request, error: Exception) -> Response:
        methods = methods_of(request.scope, app.routes)
        message = wrong_method_message(request.scope, methods)
        return error_response(message, 405, headers={"Allow": ", ".join(methods)})

    app.add_exception_handler(404, handle_no_route)
    app.add_exception_handler(405, handle_wrong_method)
    for kind in (RequestError, ServiceError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)


async def read_body(request: Request, max_bytes: int, flag: str = "--max-request-bytes") -> bytes:
    """The body of a request, read no further than `max_bytes`, which `flag` sets.

    Raises:
        RequestError: with status 413 if it is longer.
        ClientDisconnect: if the client leaves before its end.
    """
    return b"".join([part async for part in body_parts(request, max_bytes, flag)])


async def body_parts(request: Request, max_bytes: int, flag: str) -> AsyncGenerator[bytes, None]:
    """The body of a request as it arrives; raises as `read_body` does."""
    too_large = RequestError(None, f"The body is larger than {max_bytes} bytes ({flag}).", 413)
    if (declared_bytes(request) or 0) > max_bytes:
        raise too_large
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        yield part


def declared_bytes(request: Request) -> int | None:
    """The size of the body in bytes as the client has declared it, if it has."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdigit() else None


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled as soon as the client is gone.

    Raises:
        ClientDisconnect: if the client leaves first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class OutermostApp:
    """The application that the web server calls, around all others.

    Streams find in their scope the `send` of the web server: every middleware and route handler
    wraps `send` to see how a response starts. The events after the start concern none of them, and
    each wrapper costs something for every token.

    Every request gets an id (`sglang.srt.request_id`), and every answer has it as `x-request-id`.

    A request that the web server cancels at its end, whatever it was at, is answered with 503.

    Args:
        reason: why the server ends.
        max_id_chars: of a client's own id.
    """

    def __init__(self, app: ASGIApp, reason: Callable[[], str], max_id_chars: int) -> None:
        self._app = app
        self._reason = reason
        self._max_id_chars = max_id_chars

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        request_id = RequestId.of(scope["headers"], self._max_id_chars)
        CURRENT.set(request_id)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            has_started = True
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER, request_id.text.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if has_started:
                raise
            await error_response(self._reason(), 503)(scope, receive, send_with_id)


class EventStream(Response):
    """Server-sent events: `data: {json}` for each chunk, then `data: [DONE]`.

    An error becomes one last chunk. A client that leaves closes `chunks` at once. Chunks that take
    long to write, such as those with all log-probabilities so far, come less often: other streams
    share the thread.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Any, chunks: AsyncGenerator[Any, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._first = first
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[EVENT_STREAM] = True
        try:
            direct: Send = scope.get(DIRECT_SEND, send)
            await unless_client_leaves(receive, self._send_all(send, direct))
        except ClientDisconnect:
            logger.debug("A client left in the middle of its stream.")
        finally:
            await self._chunks.aclose()

    async def _send_all(self, send: Send, direct: Send) -> None:
        """The start through everything that wraps `send`, the events directly."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        send = direct
        try:
            await send(_event(self._first))
            async for chunk in self._chunks:
                began_s = time.perf_counter()
                event = _event(chunk)
                took_s = time.perf_counter() - began_s
                await send(event)
                if took_s > LONG_EVENT_S:
                    await asyncio.sleep(took_s * PAUSE_RATIO)
        except (RequestError, ServiceError) as error:
            await send(_event(error_body(error.message, error.status_code)))
        except Exception:
            logger.exception("A stream failed.")
            await send(_event(error_body("The server failed on this request.", 500)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _event(content: Any) -> Message:
    """A part of a response's body: one event."""
    body = b"data: " + _encode(content) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}
