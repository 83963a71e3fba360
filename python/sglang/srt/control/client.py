"""The front end's side of control calls: one message each, one reply, its time limit.

Bodies are checked before (`bodies.py`); the order of calls is kept by the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.messages.control import (
    CONTROL_TIMEOUT_S,
    ControlCall,
    ControlOutput,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
)
from sglang.srt.messages.requests import ToScheduler


class ControlClient:
    """Sends control messages to the scheduler and waits for their replies, on one asyncio loop.

    Every call raises `ServiceError` if the scheduler is dead (503), does not answer in time (503)
    or fails, and `RequestError` with the scheduler's reason if it refuses.

    Args:
        send: takes messages for the scheduler.

    Attributes:
        status: what the scheduler has last said of itself.
        frozen: set while nothing runs, so nothing will end by itself.
    """

    def __init__(self, send: Callable[[ToScheduler], None]) -> None:
        self.status = EngineStatus()
        self.frozen = asyncio.Event()
        self._send = send
        self._failure: str | None = None
        self._call_ids = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}

    async def call(self, call: ControlCall) -> dict[str, Any]:
        """Sends a call; what a client is told of its reply, if that says yes."""
        call.call_id = next(self._call_ids)
        reply: ControlReply = await self._ask(call, call.call_id, call.reply_timeout_s)
        if reply.success:
            return {"message": reply.message, **call.verdict, **reply.fields}
        if reply.status_code >= 500:
            raise ServiceError(reply.message, reply.status_code)
        raise RequestError(None, reply.message, reply.status_code)

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """Empties the prefix cache; `success` is false if requests hold KV after `timeout_s`."""
        message = FlushCacheReqInput(call_id=next(self._call_ids), timeout_s=timeout_s)
        reply: FlushCacheReqOutput = await self._ask(
            message, message.call_id, timeout_s + CONTROL_TIMEOUT_S
        )
        return reply

    async def internal_state(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """`internal_states[0]` of `/server_info`."""
        message = GetInternalStateReq(call_id=next(self._call_ids))
        reply: GetInternalStateReqOutput = await self._ask(message, message.call_id, timeout_s)
        return reply.internal_state

    async def ping(self, timeout_s: float) -> None:
        """Returns when a message has gone round all processes."""
        message = HealthPing(call_id=next(self._call_ids))
        await self._ask(message, message.call_id, timeout_s)

    def handle(self, message: ControlOutput | HealthPing) -> None:
        """Takes in a reply, or the engine's status; a reply that nobody waits for is dropped."""
        if isinstance(message, EngineStatus):
            self.status = message
            if message.is_frozen:
                self.frozen.set()
            else:
                self.frozen.clear()
            return
        future = self._replies.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self, reason: str) -> None:
        """Gives every waiting call a 503, and every later one: none will be answered."""
        self._failure = self._failure or reason
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ServiceError(reason, 503))

    async def _ask(self, message: ToScheduler, call_id: int, timeout_s: float | None) -> Any:
        """Sends a message, at once, and waits for the reply with its call_id."""
        if self._failure is not None:
            raise ServiceError(self._failure, 503)
        future = asyncio.get_running_loop().create_future()
        self._replies[call_id] = future
        try:
            self._send(message)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise ServiceError(f"No answer from the scheduler in {timeout_s:g} s.", 503) from None
        finally:
            del self._replies[call_id]
