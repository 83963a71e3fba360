"""The life of a server: bind, start, serve, drain, exit."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from sglang.srt.entrypoints.access import AccessRules
from sglang.srt.entrypoints.children import Child
from sglang.srt.entrypoints.connection_limits import LimitedRequests
from sglang.srt.entrypoints.front_end import make_manager
from sglang.srt.entrypoints.half_close import HalfCloseProtocol
from sglang.srt.entrypoints.http_io import OutermostApp
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.entrypoints.launch import (
    FrontendChannels,
    LaunchError,
    ProcessTree,
    find_model,
)
from sglang.srt.entrypoints.openai.chat_settings import chat_settings_of
from sglang.srt.entrypoints.server_info import describe_start
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.managers.tokenizer_manager import (
    PROBE,
    PROBE_PARAMS,
    SHUTDOWN_MESSAGE,
    TokenizerManager,
)
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.observability.start_log import start_phase
from sglang.srt.processes.child_process import configure_logging
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.model_folders import ModelFolders
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer, TokenizerError
from sglang.srt.utils.common import set_ulimit

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
OTHER_FILES = 1024  # that the server opens beside its connections, generously
FLUSH_TIMEOUT_S = 3  # for clients to read the end of their answers while the server exits
WARMUP_TIMEOUT_S = 300.0
WARMUP_TOKENS = 4


REFUSALS = (ConfigError, ModelPathError, TokenizerError, LaunchError)


class BindError(OSError):
    """The address cannot be listened on; the message is one line for the user."""


def run_server(server_args: ServerArgs, waiting: Mapping[str, Child] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. `waiting` is of `ProcessTree`.

    0 after a signal; 1, with one line on standard error, if the server cannot start or a process
    of it dies.
    """
    configure_logging(server_args.log_level, "server")
    try:
        folders, tokenizer = check_start(server_args)
        listener = listen(server_args.host, server_args.port)
    except (*REFUSALS, BindError) as error:
        _say(str(error))
        return 1
    set_ulimit(server_args.max_connections + OTHER_FILES)
    with listener:
        try:
            port = listener.getsockname()[1]  # 0 asks for any
            server_args = replace(folders.with_weights(), port=port)
            _warn_if_open(server_args, listener)
            return asyncio.run(_Server(server_args, tokenizer, listener, waiting).run())
        except (LaunchError, ModelPathError) as error:
            _say(str(error))
            return 1


def check_start(server_args: ServerArgs) -> tuple[ModelFolders, Tokenizer]:
    """Does `find_model`, and looks at the flags of the HTTP application.

    Raises:
        ConfigError, ModelPathError, TokenizerError, LaunchError: one line for the user.
    """
    folders, tokenizer = find_model(server_args)
    AccessRules.of(folders.args)
    chat_settings_of(folders.args)
    return folders, tokenizer


def _say(message: str) -> None:
    print(f"sglang: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def listen(host: str, port: int) -> socket.socket:
    """Makes a listening socket, before anything costly starts.

    Raises:
        BindError: if that is not possible.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        raise BindError(
            f"Cannot listen on {host}:{port}: {error}. Choose another --port or --host."
        ) from None
    return listener


def _warn_if_open(server_args: ServerArgs, listener: socket.socket) -> None:
    """One line if everybody in the network may use the server."""
    address = listener.getsockname()[0]
    has_key = server_args.api_key is not None or server_args.admin_api_key is not None
    if not has_key and not ipaddress.ip_address(address).is_loopback:
        logger.warning(
            "Everybody who reaches %s may use and stop this server: --api-key and --admin-api-key"
            " ask for a key, --host 127.0.0.1 listens on this machine alone.",
            address,
        )


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `_Server`: uvicorn raises them again at its end, so no exit code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """Uvicorn, the process tree and the tokenizer manager, from start to exit."""

    def __init__(
        self,
        server_args: ServerArgs,
        tokenizer: Tokenizer,
        listener: socket.socket,
        waiting: Mapping[str, Child] | None,
    ) -> None:
        self._args = server_args
        self._tokenizer = tokenizer
        self._listener = listener
        self._waiting = waiting
        self._state = ServerState(
            server_args, load_model_config(server_args.model_path, impl=server_args.model_impl)
        )
        self._uvicorn = self._make_uvicorn()
        self._exit_code = 0
        self._manager: TokenizerManager | None = None
        self._stop = asyncio.Event()
        self._hasten = asyncio.Event()

    def _make_uvicorn(self) -> _Uvicorn:
        is_debug = self._args.log_level == "debug"
        config = uvicorn.Config(
            OutermostApp(
                LimitedRequests(create_app(self._state), self._args.max_header_bytes),
                self._why_it_ends,
                self._args.max_label_chars,
            ),
            http=HalfCloseProtocol,
            limit_concurrency=self._args.max_connections,
            h11_max_incomplete_event_size=self._args.max_header_bytes,
            log_config=None,
            log_level="debug" if is_debug else "warning",
            access_log=is_debug,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
        )
        return _Uvicorn(config)

    async def run(self) -> int:
        """Serves from the first moment, with 503 until ready; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

        def on_end(reason: str) -> None:
            loop.call_soon_threadsafe(self._fail, f"{reason}; the server stops.")

        tree = ProcessTree(self._args, on_end, self._waiting)
        self._state.private_directory = tree.private_directory
        try:
            channels = FrontendChannels(tree.addresses)
        except LaunchError:
            tree.stop()
            raise
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            info = await self._start(tree)
            model = self._state.model_config
            manager = make_manager(
                channels, self._args, self._tokenizer, info, tree.watch, model=model
            )
            await self._serve_until_stopped(manager, info)
        except (LaunchError, ServiceError) as error:
            if self._stop.is_set():
                logger.info("Stopped before the server was ready.")
            else:
                self._fail(str(error))
        finally:
            self._uvicorn.should_exit = True
            await serving
            await asyncio.to_thread(tree.stop)
            channels.close()
        return self._exit_code

    async def _start(self, tree: ProcessTree) -> SchedulerInfo:
        """Starts the children; a signal ends the start with a LaunchError."""
        starting = asyncio.create_task(asyncio.to_thread(tree.start))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            await asyncio.to_thread(tree.stop)
        return await starting

    async def _serve_until_stopped(self, manager: TokenizerManager, info: SchedulerInfo) -> None:
        """From the first request to the end of the last one."""
        self._manager = manager
        receiving = asyncio.create_task(manager.run())
        receiving.add_done_callback(self._on_receiving_end)
        try:
            if not self._args.skip_server_warmup:
                with start_phase("Warming up with one request"):
                    await _warm_up(manager)
            keep_out_of_collections()
            self._state.become_ready(manager, info)
            defaults = manager.limits.openai_sampling_defaults
            logger.info("%s", describe_start(self._args, info, defaults))
            logger.info("Ready after %.1f s: %s", self._state.startup_time_s, self._describe())
            await self._stop.wait()
            if manager.failure is None:
                logger.info("Stopping; running requests get %g s.", self._args.shutdown_timeout_s)
                await manager.drain(self._args.shutdown_timeout_s, self._hasten)
        finally:
            receiving.cancel()

    def _describe(self) -> str:
        host = f"[{self._args.host}]" if ":" in self._args.host else self._args.host
        return f"{self._state.model_name} is served at http://{host}:{self._args.port}"

    def _on_signal(self) -> None:
        """The first signal drains, the second aborts what runs, the third cuts connections."""
        if self._hasten.is_set():
            self._uvicorn.force_exit = True
        elif self._stop.is_set():
            self._hasten.set()
        self._stop.set()

    def _why_it_ends(self) -> str:
        failure = None if self._manager is None else self._manager.failure
        return failure or SHUTDOWN_MESSAGE

    def _on_receiving_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("The front end cannot receive.", exc_info=task.exception())
            self._fail("The front end cannot receive outputs; the server stops.")

    def _fail(self, message: str) -> None:
        """Ends the server with exit code 1 and gives every waiting client an error."""
        _say(message)
        self._exit_code = 1
        if self._manager is not None:
            self._manager.fail_all(message)
        self._stop.set()


async def _warm_up(manager: TokenizerManager) -> None:
    """One short request through all processes.

    Raises:
        LaunchError: if it does not come back.
    """
    num_tokens = min(WARMUP_TOKENS, manager.limits.max_req_len - 1)
    params = {**PROBE_PARAMS, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {**PROBE, "sampling_params": params}
    outputs = manager.generate_request(body)
    try:
        await asyncio.wait_for(anext(outputs), WARMUP_TIMEOUT_S)
    except TimeoutError:
        raise LaunchError(f"The warm-up request had no answer in {WARMUP_TIMEOUT_S:g} s.") from None
