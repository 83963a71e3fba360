"""The front end's side of control calls: one message each, one reply, its time limit.

Bodies are checked before (`control_validation`); the order of calls is kept by the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from sglang.srt.frontend.body_parsing import RequestError
from sglang.srt.frontend.request_state import ServiceError
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    ControlOutput,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
    InitWeightsUpdateGroupReqInput,
    LeaseEnd,
    MemoryOccupationReq,
    PauseGenerationReq,
    PauseMode,
    SessionAction,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
    WeightSource,
    WeightUpdateOptions,
)
from sglang.srt.messages.requests import ToScheduler

CONTROL_TIMEOUT_S = 60.0
WEIGHTS_TIMEOUT_S = 600.0  # behind the reading of a checkpoint, or a broadcast


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

    # ---------------------------------------------------------------- pause and continue

    async def pause(
        self,
        mode: PauseMode,
        lease_s: float | None = None,
        lease_end: LeaseEnd = "continue",
        drain_timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Stops generation; returns when the engine has stopped.

        Args:
            drain_timeout_s: for `drain` only; without it that takes as long as the requests do.

        Returns:
            `message`, `status` and the scheduler's counts and epoch.
        """
        timeout_s: float | None = CONTROL_TIMEOUT_S
        if mode == "drain":
            timeout_s = None if drain_timeout_s is None else drain_timeout_s + CONTROL_TIMEOUT_S
        message = PauseGenerationReq(
            call_id=next(self._call_ids),
            mode=mode,
            lease_s=lease_s,
            lease_end=lease_end,
            drain_timeout_s=drain_timeout_s,
        )
        return _ok(await self._ask(message, message.call_id, timeout_s))

    async def resume(self) -> dict[str, Any]:
        """Ends a pause."""
        message = ContinueGenerationReq(call_id=next(self._call_ids))
        return _ok(await self._ask(message, message.call_id))

    # ---------------------------------------------------------------- cache and state

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """Empties the prefix cache; `success` is false if requests hold KV after `timeout_s`."""
        message = FlushCacheReqInput(call_id=next(self._call_ids), timeout_s=timeout_s)
        reply: FlushCacheReqOutput = await self._call(
            message, message.call_id, timeout_s + CONTROL_TIMEOUT_S
        )
        return reply

    async def internal_state(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """`internal_states[0]` of `/server_info`."""
        message = GetInternalStateReq(call_id=next(self._call_ids))
        reply: GetInternalStateReqOutput = await self._call(message, message.call_id, timeout_s)
        return reply.internal_state

    async def ping(self, timeout_s: float) -> None:
        """Returns when a message has gone round all processes."""
        message = HealthPing(call_id=next(self._call_ids))
        await self._call(message, message.call_id, timeout_s)

    # ---------------------------------------------------------------- weights and memory

    async def update_weights(
        self, source: WeightSource, options: WeightUpdateOptions
    ) -> dict[str, Any]:
        """Changes weights; within a weight session it stages them only.

        Outside a session and a pause, running requests finish with the old weights first, and
        later ones wait for the new ones. That takes as long as it takes. With
        `abort_all_requests` the scheduler ends them when the update's turn comes.
        """
        message = UpdateWeightsReq(
            call_id=next(self._call_ids),
            source=source,
            weight_version=options.weight_version,
            flush_cache=options.flush_cache,
            abort_all_requests=options.abort_all_requests,
        )
        return _success(await self._ask(message, message.call_id, None))

    async def begin_weight_update(self) -> dict[str, Any]:
        """Opens a weight session: from here on updates are staged."""
        return await self._change_session("begin", WeightUpdateOptions())

    async def commit_weight_update(self, options: WeightUpdateOptions) -> dict[str, Any]:
        """Takes over what the session has staged, all or nothing; running requests finish first."""
        return await self._change_session("commit", options)

    async def rollback_weight_update(self) -> dict[str, Any]:
        """Drops what the session has staged."""
        return await self._change_session("rollback", WeightUpdateOptions())

    async def _change_session(
        self, action: SessionAction, options: WeightUpdateOptions
    ) -> dict[str, Any]:
        message = WeightSessionReq(
            call_id=next(self._call_ids),
            action=action,
            weight_version=options.weight_version,
            flush_cache=options.flush_cache,
            abort_all_requests=options.abort_all_requests,
        )
        return _success(await self._ask(message, message.call_id, None))

    async def update_weight_version(
        self, new_version: str, abort_all_requests: bool = True
    ) -> dict[str, Any]:
        """A new label for the weights as they are."""
        message = UpdateWeightVersionReq(
            call_id=next(self._call_ids),
            new_version=new_version,
            abort_all_requests=abort_all_requests,
        )
        return _success(await self._ask(message, message.call_id, WEIGHTS_TIMEOUT_S))

    async def init_weight_group(self, body: InitWeightsUpdateGroupReqInput) -> dict[str, Any]:
        """Joins a group of a trainer."""
        message = WeightGroupReq(
            call_id=next(self._call_ids), group_name=body.group_name, join=body
        )
        timeout_s = body.timeout_s + CONTROL_TIMEOUT_S
        return _success(await self._ask(message, message.call_id, timeout_s))

    async def destroy_weight_group(self, group_name: str) -> dict[str, Any]:
        """Leaves a group."""
        message = WeightGroupReq(call_id=next(self._call_ids), group_name=group_name)
        return _success(await self._ask(message, message.call_id))

    async def release_memory(self, tags: list[str] | None) -> dict[str, Any]:
        """Gives memory back; null for all there is."""
        message = MemoryOccupationReq(call_id=next(self._call_ids), action="release", tags=tags)
        return _success(await self._ask(message, message.call_id, WEIGHTS_TIMEOUT_S))

    async def resume_memory(self, tags: list[str] | None) -> dict[str, Any]:
        """Takes released memory again; null for all there is."""
        message = MemoryOccupationReq(call_id=next(self._call_ids), action="resume", tags=tags)
        return _success(await self._ask(message, message.call_id, WEIGHTS_TIMEOUT_S))

    # ---------------------------------------------------------------- messages

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

    async def _ask(
        self, message: ToScheduler, call_id: int, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> ControlReply:
        """A reply that says yes; any other is an error."""
        reply: ControlReply = await self._call(message, call_id, timeout_s)
        if reply.success:
            return reply
        if reply.status_code >= 500:
            raise ServiceError(reply.message, reply.status_code)
        raise RequestError(None, reply.message, reply.status_code)

    async def _call(self, message: ToScheduler, call_id: int, timeout_s: float | None) -> Any:
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


def _ok(reply: ControlReply) -> dict[str, Any]:
    return {"message": reply.message, "status": "ok", **reply.fields}


def _success(reply: ControlReply) -> dict[str, Any]:
    return {"success": True, "message": reply.message, **reply.fields}
