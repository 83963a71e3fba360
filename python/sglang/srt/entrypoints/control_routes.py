"""The control routes, and nothing else: pause, abort, flush, weights, memory, metrics, load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang import __version__
from sglang.srt.control.bodies import (
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
)
from sglang.srt.control.body_reading import make_body, query_fields
from sglang.srt.control.pause_bodies import (
    AbortReqInput,
    check_flush_timeout,
)
from sglang.srt.entrypoints.control_calls import CALL_ROUTES, CallRoute
from sglang.srt.entrypoints.http_io import (
    body_parts,
    declared_bytes,
    json_response,
    read_body,
    update_failure,
)
from sglang.srt.entrypoints.openapi_schema import body_of
from sglang.srt.entrypoints.serialized_updates import Sender, update_from_serialized
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.entrypoints.tensor_file import received_weights
from sglang.srt.frontend.body_parsing import parse_json_object, parse_struct
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.frontend.work_in_threads import in_thread_if_large
from sglang.srt.messages.control import UpdateWeightsReq
from sglang.srt.observability.load import describe_load, describe_loads
from sglang.srt.observability.metrics import CONTENT_TYPE, ServerFigures, exposition
from sglang.srt.sglang_surface import neutral_fields

Route = Callable[[Request], Awaitable[Response]]
FLUSH_TEXT = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
WEIGHT_BYTES_FLAG = "--max-weight-bytes"


def add_control_routes(app: FastAPI, state: ServerState) -> None:
    """Adds everything that is not a request to generate or about one."""
    for route in CALL_ROUTES:
        _add_call(app, state, route)
    _add_abort_and_flush(app, state)
    _add_tensor_updates(app, state)
    _add_state(app, state)


def _add_call(app: FastAPI, state: ServerState, route: CallRoute[Any]) -> None:
    async def call(request: Request) -> Response:
        raw = await read_body(request, state.server_args.max_request_bytes)
        body = await in_thread_if_large(
            lambda: make_body(route.body, parse_json_object(raw if raw.strip() else b"{}")),
            len(raw),
        )
        reply = await state.control.call(route.message(body))
        return json_response(reply if route.answer is None else reply[route.answer])

    answer = _reports_success(call) if route.reports_success else call
    required = any(field.required for field in msgspec.structs.fields(route.body))
    app.add_api_route(
        route.path,
        answer,
        methods=["POST"],
        name=route.path[1:],
        description=route.description,
        openapi_extra=body_of(route.body, required),
    )
    if route.alias is not None:
        method, path = route.alias
        app.add_api_route(path, answer, methods=[method], include_in_schema=False)


def _add_abort_and_flush(app: FastAPI, state: ServerState) -> None:
    @app.post("/abort_request", openapi_extra=body_of(AbortReqInput))
    async def abort_request(request: Request) -> Response:
        """Ends requests by their rid, or all; answers with their number."""
        args = state.server_args
        raw = await read_body(request, args.max_request_bytes)
        unsupported = neutral_fields("/abort_request")
        body = await in_thread_if_large(
            lambda: parse_struct(raw, AbortReqInput, unsupported), len(raw)
        )
        body.check(args.max_label_chars)
        aborted = state.ready_manager.abort_request(
            body.rid, body.abort_all, body.message, body.prefix
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


def _add_tensor_updates(app: FastAPI, state: ServerState) -> None:
    @app.post("/update_weights_from_tensor", openapi_extra=body_of(UpdateWeightsFromTensorReqInput))
    @_reports_success
    async def update_weights_from_tensor(request: Request) -> Response:
        """Changes some weights to those of the body or of a file in shared memory.

        The body is JSON, or the bytes of a safetensors file (`application/octet-stream`) with the
        options in the URL. Pickles: with --allow-pickled-weights, from this machine.
        """
        max_bytes = state.server_args.max_weight_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream":
            return json_response(await _update_from_bytes(request, state, max_bytes))
        raw = await read_body(request, max_bytes, WEIGHT_BYTES_FLAG)

        def read_update() -> UpdateWeightsFromTensorReqInput | UpdateWeightsReq:
            body = make_body(UpdateWeightsFromTensorReqInput, parse_json_object(raw))
            if body.serialized_named_tensors:
                return body
            return body.update(body.source(max_bytes))

        update = await in_thread_if_large(read_update, len(raw))
        if isinstance(update, UpdateWeightsReq):
            return json_response(await state.control.call(update))
        sender = Sender(request.client and request.client.host, request.headers)
        return json_response(
            await update_from_serialized(
                state.control, update, state.server_args, state.private_directory, sender
            )
        )


def _add_state(app: FastAPI, state: ServerState) -> None:
    @app.get("/weight_version", include_in_schema=False)
    @app.get("/get_weight_version")
    async def get_weight_version() -> Response:
        """The label of the weights."""
        return json_response({"weight_version": state.control.status.weight_version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures of the scheduler and of requests, for Prometheus."""
        figures = ServerFigures(
            state=await state.control.internal_state(),
            requests=state.ready_manager.metrics,
            num_slots=state.num_kv_slots,
            model_name=state.model_name,
            predicts_tokens=state.predicts_tokens,
        )
        return Response(exposition(figures), headers={"content-type": CONTENT_TYPE})

    @app.get("/get_loads", include_in_schema=False)
    @app.get("/v1/loads")
    async def loads() -> Response:
        """Requests and KV tokens, for those who spread requests over servers."""
        internal_state = await state.control.internal_state()
        now, slots = datetime.now(UTC), state.num_kv_slots
        return json_response(describe_loads(internal_state, slots, now, __version__))

    @app.get("/get_load")
    async def load() -> Response:
        """Answers with the content of `/v1/loads`, in SGLang's older form."""
        internal_state = await state.control.internal_state()
        return json_response(describe_load(internal_state, state.num_kv_slots))


async def _update_from_bytes(
    request: Request, state: ServerState, max_bytes: int
) -> dict[str, Any]:
    """An update by the body itself. It may be large, so it goes to a file as it arrives."""
    options = make_body(WeightUpdateOptions, query_fields(request.query_params))
    parts = body_parts(request, max_bytes, WEIGHT_BYTES_FLAG)
    most = declared_bytes(request) or max_bytes
    async with received_weights(parts, most, state.private_directory) as source:
        return await state.control.call(options.update(source))


def _reports_success(route: Route) -> Route:
    """A route whose answers, errors too, have `success` and `message`."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except (RequestError, ServiceError) as error:
            return update_failure(error)

    answer.__name__, answer.__doc__ = route.__name__, route.__doc__
    return answer
