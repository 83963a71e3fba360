"""The offline Engine: the same processes and messages as the server, without HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sglang.srt.entrypoints.launch import (
    FrontendChannels,
    ProcessTree,
    check_model,
    open_request_log,
)
from sglang.srt.entrypoints.limits import request_limits
from sglang.srt.entrypoints.server_info import describe_server
from sglang.srt.managers.control_messages import FlushCacheReqOutput
from sglang.srt.managers.io_struct import SchedulerInfo
from sglang.srt.managers.tokenizer_manager import Answer, TokenizerManager
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
WIND_DOWN_TIMEOUT_S = 1.0
SHUTDOWN_MESSAGE = "The Engine has been shut down."
RECEIVE_FAILED = "The front end cannot receive outputs; the Engine cannot go on."
OneSampling = dict[str, Any] | SamplingParams
SamplingInput = OneSampling | Sequence[OneSampling] | None


class Engine:
    """Generates text in this process's own server.

    Takes the flags of the server as keyword arguments, or a `ServerArgs`. Works in scripts without
    a `__main__` guard, in notebooks and inside running event loops. Use it as a context manager,
    or call `shutdown`; an Engine that is dropped or alive at exit shuts itself down.

    Raises:
        ValueError: if the model directory cannot be read.
        LaunchError: if the processes cannot start.
    """

    def __init__(self, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise ValueError("Give server_args or keyword arguments, not both.")
        self.server_args = server_args or ServerArgs(**{"log_level": "error", **kwargs})
        tokenizer = check_model(self.server_args)
        self._runtime = _Runtime(self.server_args, tokenizer)
        self._finalizer = weakref.finalize(self, self._runtime.stop)
        try:
            self._runtime.start()
        except BaseException:
            self._finalizer()
            raise

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: SamplingInput = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """Generates for a prompt or a batch.

        Args:
            fields: other fields of `/generate`, such as return_logprob=True or priority=3.

        Returns:
            The answer of `/generate`: a dict, or a list for a batch or n > 1. With `stream`, an
            iterator of cumulative chunks; leaving it early aborts the request.

        Raises:
            ValueError: naming the field that is wrong.
            RuntimeError: if the Engine is shut down or a process of it has died.
        """
        outputs = self._outputs(prompt, sampling_params, input_ids, stream, rid, fields)
        if stream:
            return self._iterate(outputs)
        return self._runtime.wait_for(_only(outputs))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: SamplingInput = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """`generate` for a running event loop; with `stream`, awaiting gives an async iterator."""
        outputs = self._outputs(prompt, sampling_params, input_ids, stream, rid, fields)
        if stream:
            return self._iterate_async(outputs)
        return await self._runtime.wait_for_async(_only(outputs))

    def flush_cache(self) -> FlushCacheReqOutput:
        """Empties the prefix cache; `success` is false while requests run or wait."""
        return self._runtime.wait_for(self._runtime.manager.flush_cache())

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> int:
        """Ends requests by their exact rid, or all; returns how many that concerns."""
        if rid is None and not abort_all:
            raise ValueError("rid: give a rid, or abort_all=True.")

        async def abort() -> int:
            return self._runtime.manager.abort_request(rid, abort_all)

        return self._runtime.wait_for(abort())

    def get_server_info(self) -> dict[str, Any]:
        """The answer of `/server_info`."""
        state = self._runtime.wait_for(self._runtime.manager.internal_state())
        return describe_server(self.server_args, self._runtime.info, state)

    def shutdown(self) -> None:
        """Ends the processes; requests still running get a RuntimeError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _outputs(
        self,
        prompt: str | list[str] | None,
        sampling_params: SamplingInput,
        input_ids: list[int] | list[list[int]] | None,
        stream: bool,
        rid: str | list[str] | None,
        fields: dict[str, Any],
    ) -> AsyncGenerator[Answer, None]:
        body = {
            "text": prompt,
            "input_ids": input_ids,
            "sampling_params": _sampling_fields(sampling_params),
            "rid": rid,
            "stream": stream,
            **fields,
        }
        return self._runtime.manager.generate_request(body)

    def _iterate(self, outputs: AsyncGenerator[Answer, None]) -> Iterator[Any]:
        try:
            while (chunk := self._runtime.wait_for(_next(outputs))) is not None:
                yield chunk
        finally:
            self._runtime.submit(_close(outputs))

    async def _iterate_async(self, outputs: AsyncGenerator[Answer, None]) -> AsyncIterator[Any]:
        try:
            while (chunk := await self._runtime.wait_for_async(_next(outputs))) is not None:
                yield chunk
        finally:
            self._runtime.submit(_close(outputs))


def _sampling_fields(params: Any) -> Any:
    """Sampling parameters as `/generate` takes them; what is no such thing is refused there."""
    if isinstance(params, list | tuple):
        return [_sampling_fields(item) for item in params]
    return msgspec.to_builtins(params) if isinstance(params, SamplingParams) else params


async def _next(outputs: AsyncGenerator[Answer, None]) -> Answer | None:
    """The next chunk, or None at the end."""
    return await anext(outputs, None)


async def _only(outputs: AsyncGenerator[Answer, None]) -> Answer:
    """The one answer of a request that does not stream."""
    try:
        return await anext(outputs)
    finally:
        await outputs.aclose()


async def _close(outputs: AsyncGenerator[Answer, None]) -> None:
    await outputs.aclose()


class _Runtime:
    """The processes, and the tokenizer manager on a loop of its own in a background thread.

    It does not know its Engine, so that an Engine that nobody uses any more can end it.
    """

    def __init__(self, server_args: ServerArgs, tokenizer: Tokenizer) -> None:
        self._server_args = server_args
        self._tokenizer = tokenizer
        self._tree = ProcessTree(server_args, self._on_death)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-engine", daemon=True
        )
        self._channels: FrontendChannels | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._manager: TokenizerManager | None = None
        self._info: SchedulerInfo | None = None
        self._request_log: RequestLog | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def manager(self) -> TokenizerManager:
        """The manager.

        Raises:
            RuntimeError: before the start and after the end.
        """
        if self._manager is None or self._closed:
            raise RuntimeError(SHUTDOWN_MESSAGE)
        return self._manager

    @property
    def info(self) -> SchedulerInfo | None:
        return self._info

    def start(self) -> None:
        """Starts everything; blocks until requests can be served."""
        self._thread.start()
        self._channels = self.wait_for(self._open_channels())
        self._info = self._tree.start()
        limits = request_limits(self._server_args, self._info)
        self._request_log = open_request_log(self._server_args)
        self._manager = self._channels.make_manager(self._tokenizer, limits, self._request_log)
        self.wait_for(self._start_receiving(self._manager))

    async def _open_channels(self) -> FrontendChannels:
        return FrontendChannels(self._tree.addresses)

    async def _start_receiving(self, manager: TokenizerManager) -> None:
        self._receiving = asyncio.create_task(manager.run())
        self._receiving.add_done_callback(self._on_receiving_end)

    def _on_receiving_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._manager is not None:
            logger.error(RECEIVE_FAILED, exc_info=task.exception())
            self._manager.fail_all(RECEIVE_FAILED)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the loop; an interrupt here cancels it there."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def wait_for_async(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """`wait_for` for a caller on another loop."""
        return asyncio.wrap_future(self._submit(work))

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` on the loop, if there still is one, without waiting."""
        with suppress(RuntimeError):
            self._submit(work)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError(SHUTDOWN_MESSAGE)

    def _on_death(self, role: str, code: int) -> None:
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = f"The {role} process ended with {reason}; the Engine cannot go on."
        self.submit(self._fail_all(message))

    async def _fail_all(self, message: str) -> None:
        if self._manager is not None:
            self._manager.fail_all(message)

    def stop(self) -> None:
        """Fails what still runs, ends the loop and the processes; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._wind_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._tree.stop()
        if self._request_log is not None:
            self._request_log.close()

    async def _wind_down(self) -> None:
        await self._fail_all(SHUTDOWN_MESSAGE)
        if self._receiving is not None:
            self._receiving.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=WIND_DOWN_TIMEOUT_S)
        if self._channels is not None:
            self._channels.close()
