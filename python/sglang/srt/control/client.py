"""The front end's side of control calls: one message each, one reply, its time limit.

Bodies are checked before (`bodies.py`); the order of calls is kept by the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import time
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
from sglang.srt.process_watch import LOOK_S, ProcessWatch, Stop

PING_TIMEOUT_S = 1.5


class ProcessStopped(ServiceError):
    """A process that must answer is stopped: the call was not sent, or it was a question and is
    given up."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.message, 503)


class NoAnswer(ServiceError):
    """No reply came in time."""


class ControlClient:
    """Sends control messages to the scheduler and waits for their replies, on one asyncio loop.

    Every call raises `ServiceError` if the scheduler is dead or stopped (503), does not answer in
    time (503) or fails, and `RequestError` with the scheduler's reason if it refuses. A call that
    was sent before the scheduler was stopped waits until it goes on, unless it only asks something.

    Args:
        send: takes messages for the scheduler.
        watch: knows which processes are stopped; None: none is.

    Attributes:
        status: the last status that the scheduler sent.
        frozen: set while nothing runs, so nothing will end by itself.
    """

    def __init__(
        self, send: Callable[[ToScheduler], None], watch: ProcessWatch | None = None
    ) -> None:
        self.status = EngineStatus()
        self.frozen = asyncio.Event()
        self._send = send
        self._watch = watch or ProcessWatch()
        self._last_state: tuple[float, dict[str, Any]] | None = None
        self._failure: str | None = None
        self._call_ids = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}

    async def call(self, call: ControlCall) -> dict[str, Any]:
        """Sends a call; returns the fields of its reply for the client, if that is a success."""
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
        """Returns `internal_states[0]` of `/server_info`. While the scheduler is stopped it is the
        last known state; `state_age_s` is its age in seconds, 0 for a new one."""
        message = GetInternalStateReq(call_id=next(self._call_ids))
        try:
            reply: GetInternalStateReqOutput = await self._ask(
                message, message.call_id, timeout_s, is_question=True
            )
            self._last_state = time.monotonic(), reply.internal_state
        except ProcessStopped:
            if self._last_state is None:
                raise
        known_at_s, state = self._last_state
        stop = self._watch.stopped()
        return {
            **state,
            "stopped_process": None if stop is None else stop.role,
            "state_age_s": round(time.monotonic() - known_at_s, 3),
        }

    async def ping(self, timeout_s: float) -> None:
        """Returns when a message has gone round all processes. If it has not come back in time,
        because a step may be long, it is enough that all processes beat."""
        message = HealthPing(call_id=next(self._call_ids))
        roles = ("scheduler", "detokenizer")
        try:
            await self._ask(message, message.call_id, timeout_s, roles, is_question=True)
        except NoAnswer:
            if not self._watch.all_beat(*roles):
                raise

    def refuse_if_unable(self, *roles: str) -> None:
        """Returns if these processes, or all, can answer now.

        Raises:
            ServiceError: if none will answer any more; ProcessStopped if one is stopped.
        """
        if self._failure is not None:
            raise ServiceError(self._failure, 503)
        if (stop := self._watch.stopped(*roles)) is not None:
            raise ProcessStopped(stop)

    def handle(self, message: ControlOutput | HealthPing) -> None:
        """Takes in a reply, or the engine's status; a reply without a waiting call is dropped."""
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
        """Answers every waiting call, and every later one, with 503."""
        self._failure = self._failure or reason
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ServiceError(reason, 503))

    async def _ask(
        self,
        message: ToScheduler,
        call_id: int,
        timeout_s: float | None,
        roles: tuple[str, ...] = ("scheduler",),
        is_question: bool = False,
    ) -> Any:
        """Sends a message, at once, and waits for the reply with its call_id.

        Args:
            roles: the processes that it goes through.
            is_question: the call changes nothing, so it is given up if a process stops meanwhile.
        """
        self.refuse_if_unable(*roles)
        future = asyncio.get_running_loop().create_future()
        self._replies[call_id] = future
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                while is_question and not future.done():
                    await asyncio.wait({future}, timeout=LOOK_S)
                    if not future.done():
                        self.refuse_if_unable(*roles)
                return await future
        except TimeoutError:
            who = " or the ".join(roles)
            raise NoAnswer(f"No answer from the {who} in {timeout_s:g} s.", 503) from None
        finally:
            del self._replies[call_id]
