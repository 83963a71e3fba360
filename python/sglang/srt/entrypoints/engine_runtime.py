"""Runs an Engine: its processes, and a loop of its own in a background thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.control.client import ControlClient
from sglang.srt.entrypoints.front_end import make_manager
from sglang.srt.entrypoints.launch import FrontendChannels, ProcessTree
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
WIND_DOWN_TIMEOUT_S = 1.0
FORKED_MESSAGE = (
    "This Engine was made before this process was forked, and its threads and sockets are its"
    " parent's. Make the Engine in the process that uses it, or start processes with the method"
    " spawn."
)
SHUTDOWN_MESSAGE = "The Engine has been shut down."
RECEIVE_FAILED = "The front end cannot receive outputs; the Engine cannot go on."


class EngineRuntime:
    """The processes, and the tokenizer manager on a loop of its own in a background thread.

    It does not know its Engine, so that an Engine out of use can end it.
    """

    def __init__(self, server_args: ServerArgs, tokenizer: Tokenizer) -> None:
        self._server_args = server_args
        self._tokenizer = tokenizer
        self._tree = ProcessTree(server_args, self._on_end)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-engine", daemon=True
        )
        self._channels: FrontendChannels | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._manager: TokenizerManager | None = None
        self._info: SchedulerInfo | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @property
    def manager(self) -> TokenizerManager:
        """The manager.

        Raises:
            RuntimeError: before the start and after the end, and in a forked child.
        """
        self._refuse_if_forked()
        if self._manager is None or self._closed:
            raise RuntimeError(SHUTDOWN_MESSAGE)
        return self._manager

    @property
    def control(self) -> ControlClient:
        """The manager's control client; raises as `manager` does."""
        return self.manager.control

    @property
    def private_directory(self) -> Path:
        """A directory for files that only this user may read; it ends with the Engine."""
        return self._tree.private_directory

    @property
    def info(self) -> SchedulerInfo | None:
        return self._info

    def start(self) -> None:
        """Starts everything; blocks until requests can be served."""
        self._thread.start()
        self._channels = self.wait_for(self._open_channels())
        self._info = self._tree.start()
        self._manager = make_manager(
            self._channels, self._server_args, self._tokenizer, self._info, self._tree.watch
        )
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

    def _refuse_if_forked(self) -> None:
        """Nothing would ever answer: a fork takes no threads along."""
        if os.getpid() != self._pid:
            raise RuntimeError(FORKED_MESSAGE)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self._refuse_if_forked()
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError(SHUTDOWN_MESSAGE)

    def _on_end(self, reason: str) -> None:
        self.submit(self._fail_all(f"{reason}; the Engine cannot go on."))

    async def _fail_all(self, message: str) -> None:
        if self._manager is not None:
            self._manager.fail_all(message)

    def stop(self) -> None:
        """Fails what still runs, ends the loop and the processes; later calls do nothing, nor does
        one in a forked child, whose parent may go on."""
        if os.getpid() != self._pid:
            return
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

    async def _wind_down(self) -> None:
        await self._fail_all(SHUTDOWN_MESSAGE)
        if self._receiving is not None:
            self._receiving.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=WIND_DOWN_TIMEOUT_S)
        if self._channels is not None:
            self._channels.close()
