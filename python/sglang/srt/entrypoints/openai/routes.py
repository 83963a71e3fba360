"""OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_io import (
    EventStream,
    answer_response,
    error_response,
    json_response,
    read_body,
    unless_client_leaves,
)
from sglang.srt.entrypoints.openai import chat_protocol
from sglang.srt.entrypoints.openai.body_schemas import CHAT_BODY, COMPLETION_BODY
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.entrypoints.openai.models import describe_model, describe_models
from sglang.srt.entrypoints.openai.protocol import (
    parse_completion,
    parse_openai,
)
from sglang.srt.entrypoints.openai.serving_chat import ChatCompletion
from sglang.srt.entrypoints.openai.serving_completions import Completion
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.frontend.errors import field_error
from sglang.srt.frontend.request_limits import check_text_allowed
from sglang.srt.frontend.work_in_threads import in_thread_if_large


class Call(Protocol):
    """A call of a route that generates."""

    @property
    def streams(self) -> bool: ...

    def answer(self) -> AsyncGenerator[dict[str, Any], None]: ...

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]: ...


def add_openai_routes(app: FastAPI, state: ServerState, chat: ChatSettings) -> None:
    """Adds `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""
    _add_models(app, state)
    name = state.model_name

    @app.post("/v1/completions", openapi_extra=COMPLETION_BODY)
    async def completions(request: Request) -> Response:
        """Completes a prompt, or each of a list, in the form of OpenAI's API."""
        manager = state.ready_manager
        limits = manager.limits

        def make(raw: bytes) -> Call:
            body = parse_completion(raw, limits.unknown_openai_fields, limits)
            return Completion(manager, body, name)

        return await _run(request, state, make)

    @app.post("/v1/chat/completions", openapi_extra=CHAT_BODY)
    async def chat_completions(request: Request) -> Response:
        """Continues a chat, in the form of OpenAI's API."""
        manager = state.ready_manager
        limits = manager.limits

        def make(raw: bytes) -> Call:
            unknown, unsupported = limits.unknown_openai_fields, chat_protocol.UNSUPPORTED
            body = parse_openai(raw, ChatCompletionRequest, unsupported, unknown, limits)
            return ChatCompletion(manager, chat, body, name)

        return await _run(request, state, make)


def _add_models(app: FastAPI, state: ServerState) -> None:
    name = state.model_name

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return json_response(describe_models(name, state.ready_manager.limits.max_req_len))

    @app.get("/v1/models/{model:path}")
    async def model_by_name(model: str) -> Response:
        """The model that is served, by its name."""
        if model != name:
            return error_response("There is no such model; see /v1/models.", 404, "model")
        return json_response(describe_model(name, state.ready_manager.limits.max_req_len))


async def _run(request: Request, state: ServerState, make: Callable[[bytes], Call]) -> Response:
    """The answer to a body, or its stream."""
    check_text_allowed(None, state.ready_manager.limits, "use /generate with input_ids")
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise field_error("content-type", "must be application/json")
    raw = await read_body(request, state.server_args.max_request_bytes)
    call = await in_thread_if_large(lambda: make(raw), len(raw))
    outputs = call.chunks() if call.streams else call.answer()
    # The first output decides the HTTP status, of a stream too.
    first = await unless_client_leaves(request.receive, anext(outputs))
    if call.streams:
        return EventStream(first, outputs)
    await outputs.aclose()
    return await answer_response(request, first)
