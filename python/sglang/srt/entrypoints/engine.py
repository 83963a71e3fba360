"""The offline Engine: the same processes and messages as the server, without HTTP."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, cast

from sglang.srt.control.bodies import (
    BeginWeightUpdateReqInput,
    CommitWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    RollbackWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightUpdateOptions,
)
from sglang.srt.control.body_reading import make_body
from sglang.srt.control.inspection_bodies import (
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
)
from sglang.srt.control.pause_bodies import (
    AbortReqInput,
    ContinueGenerationReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
    check_flush_timeout,
)
from sglang.srt.entrypoints.engine_answers import (
    SamplingInput,
    close,
    next_chunk,
    only_answer,
    sampling_fields,
)
from sglang.srt.entrypoints.engine_runtime import EngineRuntime
from sglang.srt.entrypoints.launch import find_model
from sglang.srt.entrypoints.launcher_parts import launch_subprocesses as _launch_subprocesses
from sglang.srt.entrypoints.serialized_updates import (
    SerializedTensors,
    serialized_request,
    update_from_serialized,
)
from sglang.srt.entrypoints.server_info import describe_server
from sglang.srt.entrypoints.tensor_file import NamedTensors, written_tensors
from sglang.srt.managers.tokenizer_manager import Answer
from sglang.srt.messages.control import DEFAULT_GROUP, ControlCall, FlushCacheReqOutput
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.refused_names import init_tokenizer_manager as init_tokenizer_manager
from sglang.srt.utils.refused_names import run_detokenizer_process as run_detokenizer_process
from sglang.srt.utils.refused_names import run_scheduler_process as run_scheduler_process


class Engine:
    """Generates text in this process's own server.

    Takes the flags of the server as keyword arguments, or a `ServerArgs`. Works in scripts without
    a `__main__` guard, in notebooks and inside running event loops. Use it as a context manager,
    or call `shutdown`; an Engine that is dropped or alive at exit shuts itself down.

    Raises:
        ValueError: if the model directory cannot be read, or a number is none that its flag can be.
        LaunchError: if the processes cannot start.
    """

    _launch_subprocesses = staticmethod(_launch_subprocesses)

    def __init__(self, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise ValueError("Give server_args or keyword arguments, not both.")
        self.server_args = server_args or ServerArgs(**{"log_level": "error", **kwargs})
        folders, tokenizer = find_model(self.server_args)
        self.server_args = folders.with_weights()
        self._runtime = EngineRuntime(self.server_args, tokenizer)
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
        fields = {"stream": stream, "rid": rid, **fields}
        outputs = self._outputs(prompt, sampling_params, input_ids, fields)
        if stream:
            return self._iterate(outputs)
        return self._runtime.wait_for(only_answer(outputs))

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
        fields = {"stream": stream, "rid": rid, **fields}
        outputs = self._outputs(prompt, sampling_params, input_ids, fields)
        if stream:
            return self._iterate_async(outputs)
        return await self._runtime.wait_for_async(only_answer(outputs))

    # ---------------------------------------------------------------- pause, abort, flush

    def pause_generation(
        self,
        mode: str = "retract",
        lease_s: float | None = None,
        lease_end: str = "continue",
        drain_timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Stops generation; returns when the engine has stopped. May be called from any thread.

        Args:
            mode: `abort`, `retract`, `in_place` or `drain`; see `PauseGenerationReqInput`.

        Returns:
            The answer of `/pause_generation`: message, status, counts and epoch.

        Raises:
            ValueError: naming the argument that is wrong. So do all control calls.
            RuntimeError: if the Engine cannot answer. So do all control calls.
        """
        return self._call(_pause(mode, lease_s, lease_end, drain_timeout_s))

    async def async_pause_generation(
        self,
        mode: str = "retract",
        lease_s: float | None = None,
        lease_end: str = "continue",
        drain_timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """`pause_generation` for a running event loop."""
        return await self._call_async(_pause(mode, lease_s, lease_end, drain_timeout_s))

    def continue_generation(self) -> dict[str, Any]:
        """Ends a pause; without one nothing happens."""
        return self._call(ContinueGenerationReqInput().message())

    async def async_continue_generation(self) -> dict[str, Any]:
        """`continue_generation` for a running event loop."""
        return await self._call_async(ContinueGenerationReqInput().message())

    def abort_request(
        self, rid: str | None = None, abort_all: bool = False, prefix: bool = False
    ) -> int:
        """Ends requests by their rid, or all, with the output so far.

        Args:
            prefix: take every request whose rid begins with `rid`.

        Returns:
            How many requests that concerns.
        """
        return self._runtime.wait_for(self._abort(rid, abort_all, prefix))

    async def async_abort_request(
        self, rid: str | None = None, abort_all: bool = False, prefix: bool = False
    ) -> int:
        """`abort_request` for a running event loop."""
        return await self._runtime.wait_for_async(self._abort(rid, abort_all, prefix))

    def _abort(self, *values: Any) -> Coroutine[Any, Any, int]:
        body = make_body(
            AbortReqInput, dict(zip(("rid", "abort_all", "prefix"), values, strict=True))
        )
        body.check(self.server_args.max_label_chars)
        manager = self._runtime.manager

        async def work() -> int:
            return manager.abort_request(body.rid, body.abort_all, prefix=body.prefix)

        return work()

    def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """Empties the prefix cache; `success` is false if requests hold KV after `timeout_s`."""
        checked_s = check_flush_timeout(timeout_s, "timeout_s")
        return self._runtime.wait_for(self._runtime.control.flush_cache(checked_s))

    async def async_flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """`flush_cache` for a running event loop."""
        checked_s = check_flush_timeout(timeout_s, "timeout_s")
        return await self._runtime.wait_for_async(self._runtime.control.flush_cache(checked_s))

    # ---------------------------------------------------------------- weights and memory

    def update_weights_from_disk(self, model_path: str, **options: Any) -> dict[str, Any]:
        """Changes all weights of a model to those of a checkpoint; running requests finish first,
        except where only a draft model changes.

        Args:
            options: weight_version, flush_cache=True, abort_all_requests=False, and selector="all"
                (`target`, `draft` or `all`: the models that the weights may be of; with `all`
                names of the draft model's begin with `draft.`); here also draft_model_path.

        Returns:
            `success`, `message` and what the scheduler counts. A failure raises.
        """
        body = make_body(UpdateWeightFromDiskReqInput, {"model_path": model_path, **options})
        return self._call(body.message())

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors | SerializedTensors,
        load_format: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Changes some weights to these tensors, through a file in shared memory.

        Args:
            named_tensors: or what a trainer has serialized: a request, or a list of one entry;
                pickles need `allow_pickled_weights`.
            options: as for `update_weights_from_disk`.
        """
        if (request := serialized_request(named_tensors, load_format, options)) is not None:
            runtime, args = self._runtime, self.server_args
            return runtime.wait_for(
                update_from_serialized(runtime.control, request, args, runtime.private_directory)
            )
        body = make_body(WeightUpdateOptions, {"load_format": load_format, **options})
        with written_tensors(
            cast("NamedTensors", named_tensors), self._runtime.private_directory
        ) as source:
            return self._call(body.update(source))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = DEFAULT_GROUP,
        **options: Any,
    ) -> dict[str, Any]:
        """Changes some weights to those that rank 0 of a group broadcasts, in this order.

        Args:
            options: as for `update_weights_from_disk`.
        """
        fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        body = make_body(UpdateWeightsFromDistributedReqInput, {**fields, **options})
        return self._call(body.message())

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, **more: Any
    ) -> dict[str, Any]:
        """Joins the group that a trainer has opened.

        Args:
            more: group_name="weight_update_group", backend="gloo", timeout_s=60.0.
        """
        fields = {"master_address": master_address, "master_port": master_port, **more}
        fields |= {"rank_offset": rank_offset, "world_size": world_size}
        return self._call(make_body(InitWeightsUpdateGroupReqInput, fields).message())

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> dict[str, Any]:
        """Leaves a group."""
        body = make_body(DestroyWeightsUpdateGroupReqInput, {"group_name": group_name})
        return self._call(body.message())

    def begin_weight_update(self) -> dict[str, Any]:
        """Opens a weight session: updates are staged until a commit takes them all over."""
        return self._call(BeginWeightUpdateReqInput().message())

    def commit_weight_update(self, **options: Any) -> dict[str, Any]:
        """Takes over what was staged, all or nothing; `options` as for an update."""
        return self._call(make_body(CommitWeightUpdateReqInput, options).message())

    def rollback_weight_update(self) -> dict[str, Any]:
        """Drops what was staged."""
        return self._call(RollbackWeightUpdateReqInput().message())

    def update_weight_version(
        self, new_version: str, abort_all_requests: bool = True
    ) -> dict[str, Any]:
        """Gives the weights a new label; ends all requests first, unless told not to."""
        fields = {"new_version": new_version, "abort_all_requests": abort_all_requests}
        return self._call(make_body(UpdateWeightVersionReqInput, fields).message())

    def get_weight_version(self) -> str:
        """The label of the weights."""
        return self._runtime.control.status.weight_version

    def release_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Gives memory back: `kv_cache`, `weights`, `cuda_graph`, or None for all there is."""
        return self._call(make_body(MemoryOccupationReqInput, {"tags": tags}).release())

    def resume_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Takes released memory again."""
        return self._call(make_body(MemoryOccupationReqInput, {"tags": tags}).resume())

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first values of a weight as nested lists; `name` is the checkpoint's, of a draft
        model's weight with `draft.` before it."""
        fields = {"name": name, "truncate_size": truncate_size}
        return self._call(make_body(GetWeightsByNameReqInput, fields).message())["parameter"]

    def check_weights(self, action: str, selector: str = "target") -> dict[str, Any]:
        """Notes weights (`snapshot`), compares them with that, or makes them zero (`reset`).

        Args:
            selector: the models whose weights are noted or made zero: `target`, `draft` or `all`.
        """
        fields = {"action": action, "selector": selector}
        return self._call(make_body(CheckWeightsReqInput, fields).message())

    def start_profile(self, **options: Any) -> dict[str, Any]:
        """Begins a profile of the steps; `options` are the fields of `/start_profile`."""
        return self._call(make_body(StartProfileReqInput, options).message())

    def stop_profile(self) -> dict[str, Any]:
        """Ends the profile and writes it; the answer has its `path`."""
        return self._call(StopProfileReqInput().message())

    def _call(self, call: ControlCall) -> dict[str, Any]:
        return self._runtime.wait_for(self._runtime.control.call(call))

    async def _call_async(self, call: ControlCall) -> dict[str, Any]:
        return await self._runtime.wait_for_async(self._runtime.control.call(call))

    # ---------------------------------------------------------------- the Engine itself

    def get_server_info(self) -> dict[str, Any]:
        """The answer of `/server_info`."""
        state = self._runtime.wait_for(self._runtime.control.internal_state())
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
        fields: dict[str, Any],
    ) -> AsyncGenerator[Answer, None]:
        body = {
            "text": prompt,
            "input_ids": input_ids,
            "sampling_params": sampling_fields(sampling_params),
            **fields,
        }
        return self._runtime.manager.generate_request(body)

    def _iterate(self, outputs: AsyncGenerator[Answer, None]) -> Iterator[Any]:
        try:
            while (chunk := self._runtime.wait_for(next_chunk(outputs))) is not None:
                yield chunk
        finally:
            self._runtime.submit(close(outputs))

    async def _iterate_async(self, outputs: AsyncGenerator[Answer, None]) -> AsyncIterator[Any]:
        try:
            while (chunk := await self._runtime.wait_for_async(next_chunk(outputs))) is not None:
                yield chunk
        finally:
            self._runtime.submit(close(outputs))


def _pause(*values: Any) -> ControlCall:
    """The message of a pause; without a mode it retracts."""
    names = ("mode", "lease_s", "lease_end", "drain_timeout_s")
    given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    return make_body(PauseGenerationReqInput, {"mode": "retract", **given}).message()
