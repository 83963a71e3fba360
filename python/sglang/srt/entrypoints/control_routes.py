"""The control routes, and nothing else: pause, abort, flush, weights, memory, metrics, load."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang import __version__
from sglang.srt.control.bodies import make_body
from sglang.srt.control.validation import (
    AbortBody,
    check_abort,
    check_flush_timeout,
    check_group,
    check_label,
    check_pause,
    check_tags,
    check_update_options,
    disk_source,
    distributed_source,
    options_of_query,
    tensor_source,
)
from sglang.srt.entrypoints.http_io import (
    body_parts,
    declared_bytes,
    json_response,
    read_body,
    update_failure,
)
from sglang.srt.entrypoints.openapi_schema import body_of
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.entrypoints.tensor_file import received_weights
from sglang.srt.frontend.body_parsing import RequestError, parse_json_object, parse_struct
from sglang.srt.frontend.request_state import ServiceError
from sglang.srt.messages.control import (
    CommitWeightUpdateReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.observability.load import describe_load, describe_loads
from sglang.srt.observability.metrics import CONTENT_TYPE, metrics_text
from sglang.srt.sglang_surface import neutral_fields

S = TypeVar("S", bound=msgspec.Struct)
Route = Callable[[Request], Awaitable[Response]]
FLUSH_TEXT = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
WEIGHT_BYTES_FLAG = "--max-weight-bytes"


class NoFields(msgspec.Struct):
    """Body of a route that takes none: empty, or `{}`."""


def add_control_routes(app: FastAPI, state: ServerState) -> None:
    """Adds everything that is not a request to generate or about one."""
    _add_pause(app, state)
    _add_abort_and_flush(app, state)
    _add_weight_updates(app, state)
    _add_weight_groups(app, state)
    _add_weight_sessions(app, state)
    _add_weight_versions(app, state)
    _add_memory(app, state)
    _add_metrics(app, state)


def _add_pause(app: FastAPI, state: ServerState) -> None:
    @app.post("/pause_generation", openapi_extra=body_of(PauseGenerationReqInput, False))
    async def pause_generation(request: Request) -> Response:
        """Stops generation; answers when the engine has stopped."""
        body = await _read_optional(request, state, PauseGenerationReqInput)
        mode = check_pause(body)
        return json_response(
            await state.control.pause(mode, body.lease_s, body.lease_end, body.drain_timeout_s)
        )

    @app.post("/continue_generation", openapi_extra=body_of(ContinueGenerationReqInput, False))
    async def continue_generation(request: Request) -> Response:
        """Ends a pause."""
        await _read_optional(request, state, ContinueGenerationReqInput)
        return json_response(await state.control.resume())


def _add_abort_and_flush(app: FastAPI, state: ServerState) -> None:
    @app.post("/abort_request", openapi_extra=body_of(AbortBody))
    async def abort_request(request: Request) -> Response:
        """Ends requests by their rid, or all; answers with their number."""
        args = state.server_args
        raw = await read_body(request, args.max_request_bytes)
        body = parse_struct(raw, AbortBody, neutral_fields("/abort_request"))
        check_abort(body, args.max_label_chars)
        aborted = state.ready_manager.abort_request(
            body.rid, body.abort_all, body.abort_message, body.prefix
        )
        return json_response({"aborted": aborted})

    @app.get("/flush_cache", include_in_schema=False)
    @app.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        """Empties the prefix cache; 400 if requests still hold KV after `timeout` seconds."""
        timeout_s = check_flush_timeout(request.query_params.get("timeout", "0"))
        reply = await state.control.flush_cache(timeout_s)
        text = FLUSH_TEXT
        if reply.success and reply.flushed_items:
            text += f"Flushed items: {reply.flushed_items}\n"
        elif not reply.success and reply.error_msg:
            text += f"Reason: {reply.error_msg}\n"
        return Response(text, 200 if reply.success else 400, media_type="text/plain")


def _add_weight_updates(app: FastAPI, state: ServerState) -> None:
    @app.post("/update_weights_from_disk", openapi_extra=body_of(UpdateWeightFromDiskReqInput))
    @_reports_success
    async def update_weights_from_disk(request: Request) -> dict[str, Any]:
        """Changes all weights to those of a checkpoint of safetensors."""
        body = await _read(request, state, UpdateWeightFromDiskReqInput)
        return await state.control.update_weights(disk_source(body), body)

    @app.post("/update_weights_from_tensor", openapi_extra=body_of(UpdateWeightsFromTensorReqInput))
    @_reports_success
    async def update_weights_from_tensor(request: Request) -> dict[str, Any]:
        """Changes some weights to those of the body or of a file in shared memory.

        The body is JSON, or the bytes of a safetensors file (`application/octet-stream`) with the
        options in the URL.
        """
        max_bytes = state.server_args.max_weight_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream":
            return await _update_from_bytes(request, state, max_bytes)
        raw = await read_body(request, max_bytes, WEIGHT_BYTES_FLAG)
        body = make_body(UpdateWeightsFromTensorReqInput, parse_json_object(raw))
        return await state.control.update_weights(tensor_source(body, max_bytes), body)

    @app.post(
        "/update_weights_from_distributed",
        openapi_extra=body_of(UpdateWeightsFromDistributedReqInput),
    )
    @_reports_success
    async def update_weights_from_distributed(request: Request) -> dict[str, Any]:
        """Changes some weights to those that rank 0 of a group broadcasts."""
        body = await _read(request, state, UpdateWeightsFromDistributedReqInput)
        return await state.control.update_weights(distributed_source(body), body)


def _add_weight_groups(app: FastAPI, state: ServerState) -> None:
    @app.post("/init_weights_update_group", openapi_extra=body_of(InitWeightsUpdateGroupReqInput))
    @_reports_success
    async def init_weights_update_group(request: Request) -> dict[str, Any]:
        """Joins the group that a trainer has opened."""
        body = await _read(request, state, InitWeightsUpdateGroupReqInput)
        check_group(body)
        return await state.control.init_weight_group(body)

    @app.post(
        "/destroy_weights_update_group",
        openapi_extra=body_of(DestroyWeightsUpdateGroupReqInput, False),
    )
    @_reports_success
    async def destroy_weights_update_group(request: Request) -> dict[str, Any]:
        """Leaves a group."""
        body = await _read_optional(request, state, DestroyWeightsUpdateGroupReqInput)
        check_label("group_name", body.group_name)
        return await state.control.destroy_weight_group(body.group_name)


def _add_weight_sessions(app: FastAPI, state: ServerState) -> None:
    @app.post("/begin_weight_update")
    @_reports_success
    async def begin_weight_update(request: Request) -> dict[str, Any]:
        """Opens a weight session: updates are staged until a commit takes them all over."""
        await _read_optional(request, state, NoFields)
        return await state.control.begin_weight_update()

    @app.post("/end_weight_update", include_in_schema=False)
    @app.post("/commit_weight_update", openapi_extra=body_of(CommitWeightUpdateReqInput, False))
    @_reports_success
    async def commit_weight_update(request: Request) -> dict[str, Any]:
        """Takes over what was staged, all or nothing."""
        body = await _read_optional(request, state, CommitWeightUpdateReqInput)
        check_update_options(body)
        return await state.control.commit_weight_update(body)

    @app.post("/rollback_weight_update")
    @_reports_success
    async def rollback_weight_update(request: Request) -> dict[str, Any]:
        """Drops what was staged."""
        raw = await read_body(request, state.server_args.max_request_bytes)
        parse_struct(raw if raw.strip() else b"{}", NoFields)
        return await state.control.rollback_weight_update()


def _add_weight_versions(app: FastAPI, state: ServerState) -> None:
    @app.post("/update_weight_version", openapi_extra=body_of(UpdateWeightVersionReqInput))
    @_reports_success
    async def update_weight_version(request: Request) -> dict[str, Any]:
        """Gives the weights a new label; ends all requests first, unless told not to."""
        body = await _read(request, state, UpdateWeightVersionReqInput)
        check_label("new_version", body.new_version)
        answer = await state.control.update_weight_version(
            body.new_version, body.abort_all_requests
        )
        return {**answer, "new_version": body.new_version}

    @app.get("/get_weight_version")
    async def get_weight_version() -> Response:
        """The label of the weights."""
        return json_response({"weight_version": state.control.status.weight_version})


def _add_memory(app: FastAPI, state: ServerState) -> None:
    schema = body_of(MemoryOccupationReqInput, False)

    @app.get("/release_memory_occupation", include_in_schema=False)
    @app.post("/release_memory_occupation", openapi_extra=schema)
    @_reports_success
    async def release_memory_occupation(request: Request) -> dict[str, Any]:
        """Gives memory back to the device."""
        body = await _read_optional(request, state, MemoryOccupationReqInput)
        check_tags(body.tags)
        return await state.control.release_memory(body.tags)

    @app.get("/resume_memory_occupation", include_in_schema=False)
    @app.post("/resume_memory_occupation", openapi_extra=schema)
    @_reports_success
    async def resume_memory_occupation(request: Request) -> dict[str, Any]:
        """Takes released memory again."""
        body = await _read_optional(request, state, MemoryOccupationReqInput)
        check_tags(body.tags)
        return await state.control.resume_memory(body.tags)


def _add_metrics(app: FastAPI, state: ServerState) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        """The scheduler's state for Prometheus."""
        internal_state = await state.control.internal_state()
        text = metrics_text(internal_state, state.num_kv_slots, state.model_name)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/loads")
    async def loads() -> Response:
        """Requests and KV tokens, for those who spread requests over servers."""
        internal_state = await state.control.internal_state()
        now, slots = time.time(), state.num_kv_slots
        return json_response(describe_loads(internal_state, slots, now, __version__))

    @app.get("/get_load")
    async def load() -> Response:
        """What `/v1/loads` says, in SGLang's older form."""
        internal_state = await state.control.internal_state()
        return json_response(describe_load(internal_state, state.num_kv_slots))


async def _read(request: Request, state: ServerState, struct: type[S]) -> S:
    raw = await read_body(request, state.server_args.max_request_bytes)
    return make_body(struct, parse_json_object(raw))


async def _read_optional(request: Request, state: ServerState, struct: type[S]) -> S:
    """A body that may be missing: all its fields have defaults."""
    raw = await read_body(request, state.server_args.max_request_bytes)
    return make_body(struct, parse_json_object(raw if raw.strip() else b"{}"))


async def _update_from_bytes(
    request: Request, state: ServerState, max_bytes: int
) -> dict[str, Any]:
    """An update by the body itself. It may be large, so it goes to a file as it arrives."""
    control, options = state.control, options_of_query(request.query_params)
    parts = body_parts(request, max_bytes, WEIGHT_BYTES_FLAG)
    most = declared_bytes(request) or max_bytes
    async with received_weights(parts, most, state.private_directory) as source:
        return await control.update_weights(source, options)


def _reports_success(route: Callable[[Request], Awaitable[dict[str, Any]]]) -> Route:
    """A route whose answers, errors too, have `success` and `message`."""

    async def answer(request: Request) -> Response:
        try:
            return json_response(await route(request))
        except (RequestError, ServiceError) as error:
            return update_failure(error)

    answer.__name__, answer.__doc__ = route.__name__, route.__doc__
    return answer
