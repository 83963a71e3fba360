"""A server's parts for a launcher that runs the front end in its own process, as verl does.

The launcher calls `_launch_subprocesses` on its event loop and serves the HTTP routes itself
(`launcher_app`). The scheduler and the detokenizer are processes as of any other server, and end
with the launcher's.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from sglang.srt.control.bodies import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.control.body_reading import make_body
from sglang.srt.control.inspection_bodies import StartProfileReqInput, StopProfileReqInput
from sglang.srt.control.pause_bodies import (
    ContinueGenerationReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.entrypoints.front_end import make_manager
from sglang.srt.entrypoints.launch import FrontendChannels, ProcessTree, find_model
from sglang.srt.entrypoints.serialized_updates import (
    serialized_request,
    update_from_serialized,
)
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.frontend.generate_body import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import Answer, TokenizerManager
from sglang.srt.messages.control import ControlCall, FlushCacheReqOutput
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import load_model_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import ServerStatus
from sglang.srt.utils.refused_names import (
    init_tokenizer_manager,
    run_detokenizer_process,
    run_scheduler_process,
)

logger = logging.getLogger(__name__)

NO_LOOP = (
    "_launch_subprocesses must be called on the event loop that the server is to run on; a program"
    " without one starts a server with launch_server."
)


class LauncherManager:
    """The tokenizer manager with SGLang's calls of it, on the loop of its launcher.

    Bodies are those of the HTTP routes. A call raises RequestError, or ServiceError if the server
    cannot answer, as one of its processes has died; updates of weights report both instead.

    Attributes:
        server_status: what the launcher says of its server; nothing here reads it.
        state: what the HTTP routes answer from.
    """

    def __init__(self, state: ServerState, manager: TokenizerManager) -> None:
        self.server_status = ServerStatus.Starting
        self.state = state
        self._manager = manager
        self._receiving = asyncio.get_running_loop().create_task(manager.run())

    def generate_request(
        self, obj: GenerateReqInput | dict[str, Any], request: Any = None
    ) -> AsyncGenerator[Answer, None]:
        """Runs a request; see `TokenizerManager.generate`.

        Args:
            request: not looked at; a launcher that drops the iterator aborts the request.
        """
        return self._manager.generate_request(obj)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> int:
        """Ends requests by their rid, or all; returns how many samples that concerns."""
        return self._manager.abort_request(rid, abort_all)

    async def pause_generation(self, obj: PauseGenerationReqInput) -> dict[str, Any]:
        """Stops generation; returns when the engine has stopped."""
        return await self._call(obj.message())

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> dict[str, Any]:
        """Ends a pause."""
        return await self._call(obj.message())

    async def release_memory_occupation(
        self, obj: MemoryOccupationReqInput, request: Any = None
    ) -> dict[str, Any]:
        """Gives memory back to the device."""
        return await self._call(obj.release())

    async def resume_memory_occupation(
        self, obj: MemoryOccupationReqInput, request: Any = None
    ) -> dict[str, Any]:
        """Takes released memory again."""
        return await self._call(obj.resume())

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Empties the prefix cache; `success` is false if requests hold KV."""
        return await self._manager.control.flush_cache()

    async def update_weights_from_disk(
        self, obj: UpdateWeightFromDiskReqInput, request: Any = None
    ) -> tuple[bool, str, int]:
        """Changes all weights to those of a checkpoint; the last value is always 0."""
        return *await self._report(self._call(obj.message())), 0

    async def update_weights_from_tensor(
        self, obj: UpdateWeightsFromTensorReqInput, request: Any = None
    ) -> tuple[bool, str]:
        """Changes some weights to those of the body; pickles only if the flags allow them."""
        args = self.state.server_args
        if (request := serialized_request(obj, None, {})) is None:
            return await self._report(self._call(obj.update(obj.source(args.max_weight_bytes))))
        directory = self.state.private_directory
        return await self._report(
            update_from_serialized(self._manager.control, request, args, directory)
        )

    async def update_weights_from_distributed(
        self, obj: UpdateWeightsFromDistributedReqInput, request: Any = None
    ) -> tuple[bool, str]:
        """Changes some weights to those that rank 0 of a group broadcasts."""
        return await self._report(self._call(obj.message()))

    async def init_weights_update_group(
        self, obj: InitWeightsUpdateGroupReqInput, request: Any = None
    ) -> tuple[bool, str]:
        """Joins the group that a trainer has opened."""
        return await self._report(self._call(obj.message()))

    async def destroy_weights_update_group(
        self, obj: DestroyWeightsUpdateGroupReqInput, request: Any = None
    ) -> tuple[bool, str]:
        """Leaves a group."""
        return await self._report(self._call(obj.message()))

    async def start_profile(self, **options: Any) -> dict[str, Any]:
        """Begins a profile of the steps; `options` are the fields of `/start_profile`."""
        return await self._call(make_body(StartProfileReqInput, options).message())

    async def stop_profile(self) -> dict[str, Any]:
        """Ends the profile and writes it."""
        return await self._call(StopProfileReqInput().message())

    async def _call(self, call: ControlCall) -> dict[str, Any]:
        return await self._manager.control.call(call)

    async def _report(self, call: Coroutine[Any, Any, dict[str, Any]]) -> tuple[bool, str]:
        """Awaits a call; returns whether it was done, and what there is to say of it."""
        try:
            return True, (await call)["message"]
        except (RequestError, ServiceError) as error:
            return False, error.message


class LaunchedParts(NamedTuple):
    """Holds what `_launch_subprocesses` returns, in SGLang's order.

    Attributes:
        template_manager: None; the application reads chat templates itself.
        scheduler_info: what the scheduler found out, by SGLang's names.
    """

    tokenizer_manager: LauncherManager
    template_manager: None
    scheduler_info: dict[str, Any]


def launch_subprocesses(
    server_args: ServerArgs,
    init_tokenizer_manager_func: Any = init_tokenizer_manager,
    run_scheduler_process_func: Any = run_scheduler_process,
    run_detokenizer_process_func: Any = run_detokenizer_process,
) -> LaunchedParts:
    """Starts the processes of a server whose front end the caller runs on its own event loop.

    Blocks that loop until the model is loaded. The processes end with this process, or when no one
    has the manager any more; if one ends by itself, so do the others, and all calls fail.

    Raises:
        RuntimeError: without a running event loop.
        NotImplementedError: for a function that is not the one of this package's name.
        ConfigError, ModelPathError, TokenizerError: for a flag or a model that cannot be used.
        LaunchError: if the processes cannot start.
    """
    _refuse_others(
        (init_tokenizer_manager_func, init_tokenizer_manager),
        (run_scheduler_process_func, run_scheduler_process),
        (run_detokenizer_process_func, run_detokenizer_process),
    )
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(NO_LOOP) from None
    folders, tokenizer = find_model(server_args)
    server_args = folders.with_weights()
    state = ServerState(
        server_args, load_model_config(server_args.model_path, impl=server_args.model_impl)
    )

    def fail(message: str) -> None:
        logger.error("%s", message)
        if state.manager is not None:
            state.manager.fail_all(message)

    def on_end(reason: str) -> None:
        with suppress(RuntimeError):  # the loop has ended before the process
            loop.call_soon_threadsafe(fail, f"{reason}; the server cannot go on.")
        tree.stop()

    tree = ProcessTree(server_args, on_end)
    state.private_directory = tree.private_directory
    with ExitStack() as unless_started:
        unless_started.callback(tree.stop)
        channels = FrontendChannels(tree.addresses)
        unless_started.callback(channels.close)
        info = tree.start()
        manager = make_manager(
            channels, server_args, tokenizer, info, tree.watch, model=state.model_config
        )
        unless_started.pop_all()
    state.become_ready(manager, info)
    launched = LauncherManager(state, manager)
    weakref.finalize(launched, tree.stop)
    return LaunchedParts(launched, None, _describe(info))


def _refuse_others(*given_and_own: tuple[Any, Any]) -> None:
    for given, own in given_and_own:
        if given is not own:
            raise NotImplementedError(
                f"{given!r} cannot run here: the processes of a server are its own. Extend it by"
                " its HTTP routes, or start it with python -m sglang.launch_server."
            )


def _describe(info: SchedulerInfo) -> dict[str, Any]:
    return {
        "status": "ready",
        "max_total_num_tokens": info.max_total_num_tokens,
        "max_req_input_len": info.max_req_len,
        **info.resolved,
    }
