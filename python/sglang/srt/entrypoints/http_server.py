"""The HTTP routes, and nothing else: each reads a body, asks the tokenizer manager and answers."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang import __version__
from sglang.srt.entrypoints.access import AccessRules
from sglang.srt.entrypoints.control_routes import add_control_routes
from sglang.srt.entrypoints.engine import Engine as Engine
from sglang.srt.entrypoints.guard import add_guard
from sglang.srt.entrypoints.http_io import (
    EventStream,
    add_error_handlers,
    answer_response,
    error_response,
    json_response,
    read_body,
    unless_client_leaves,
)
from sglang.srt.entrypoints.launcher_app import GlobalState as _GlobalState  # noqa: F401
from sglang.srt.entrypoints.launcher_app import LauncherApp
from sglang.srt.entrypoints.launcher_parts import launch_subprocesses as _launch_subprocesses  # noqa: F401
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings, chat_settings_of
from sglang.srt.entrypoints.openai.routes import add_openai_routes
from sglang.srt.entrypoints.openapi_schema import body_of, install_openapi
from sglang.srt.entrypoints.page import add_page
from sglang.srt.entrypoints.server_info import describe_model, describe_server, describe_tokenizer
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.entrypoints.trainer_routes import add_trainer_routes
from sglang.srt.frontend.body_parsing import parse_json_object
from sglang.srt.frontend.generate_body import ONE_PROMPT, GenerateReqInput
from sglang.srt.frontend.tokenizer_bodies import (
    DetokenizeReqInput,
    TokenizeReqInput,
    check_detokenize,
    check_tokenize,
)
from sglang.srt.frontend.work_in_threads import in_thread_if_large, map_texts
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import add_prometheus_middleware as add_prometheus_middleware

GENERATE_BODY = body_of(
    GenerateReqInput, refers_to=[SamplingParams], more={"GenerateReqInput": ONE_PROMPT}
)


def create_app(state: ServerState) -> FastAPI:
    """The application with all routes.

    Raises:
        LaunchError: if a flag about access or chats makes no sense.
    """
    app = FastAPI(
        title="sglang-adaptive",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Response,
    )
    add_error_handlers(app)
    _add_generate(app, state)
    _add_health(app, state)
    _add_info(app, state)
    add_control_routes(app, state)
    add_trainer_routes(app, state)
    chat = chat_settings_of(state.server_args)
    _add_tokenizer(app, state, chat)
    add_openai_routes(app, state, chat)
    install_openapi(app)
    if not state.server_args.disable_ui:
        add_page(app)
    add_guard(app, AccessRules.of(state.server_args))
    return app


# By these names a launcher serves the application itself; see `launcher_app`.
app = LauncherApp(create_app)
set_global_state = app.set_global_state


def launch_server(server_args: ServerArgs) -> None:
    """Serves until SIGTERM or SIGINT, in the main thread: what launch scripts of trainers call.

    Raises:
        SystemExit: if the server cannot start or a process of it dies; standard error says why.
    """
    from sglang.srt.entrypoints.server_process import run_server  # which makes this application

    if code := run_server(server_args):
        raise SystemExit(code)


def _add_generate(app: FastAPI, state: ServerState) -> None:
    @app.put("/generate", include_in_schema=False)
    @app.post("/generate", openapi_extra=GENERATE_BODY)
    async def generate(request: Request) -> Response:
        """Generates text for a prompt or a batch of prompts, as one answer or as a stream."""
        manager = state.ready_manager
        raw = await read_body(request, state.server_args.max_request_bytes)
        checked = await in_thread_if_large(
            lambda: manager.check(parse_json_object(raw, manager.limits)), len(raw)
        )
        outputs = manager.generate(checked)
        # The first output decides the HTTP status, of a stream too.
        first = await unless_client_leaves(request.receive, anext(outputs))
        if checked.body.stream:
            return EventStream(first, outputs)
        await outputs.aclose()
        return await answer_response(request, first)


def _add_health(app: FastAPI, state: ServerState) -> None:
    @app.head("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 if every process is alive and none is stopped; one may be in a long step."""
        await state.ready_manager.health_ping()
        return Response()

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """200 if tokens are generated: one for this call, or others meanwhile."""
        await unless_client_leaves(request.receive, state.ready_manager.health_generate())
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """200 if new requests are taken and run."""
        manager = state.ready_manager
        manager.refuse_if_closed()
        if stopped := manager.control.status.stopped:
            return error_response(f"No request runs now: {stopped}", 503)
        return Response()


def _add_info(app: FastAPI, state: ServerState) -> None:
    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info")
    async def model_info() -> Response:
        """Describes the model that is served."""
        return json_response(
            describe_model(state.server_args, state.model_config, state.weight_version)
        )

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> Response:
        """Flags, the resolved configuration and the scheduler's state."""
        internal_state = await state.ready_manager.control.internal_state()
        info = describe_server(state.server_args, state.scheduler, internal_state)
        return json_response({**info, "startup_time": round(state.startup_time_s, 3)})


def _add_tokenizer(app: FastAPI, state: ServerState, chat: ChatSettings) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Gives what clients need to know that count or make tokens themselves."""
        path = state.server_args.tokenizer_path or state.model_config.folder
        tokenizer, template = state.ready_manager.tokenizer, chat.templates.default
        return json_response(describe_tokenizer(path, tokenizer, state.scheduler, template))

    @app.post("/tokenize", openapi_extra=body_of(TokenizeReqInput))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of each text of a list."""
        manager = state.ready_manager
        raw = await read_body(request, state.server_args.max_request_bytes)
        body = await in_thread_if_large(lambda: check_tokenize(raw, manager.limits), len(raw))
        is_list = isinstance(body.prompt, list)
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        names = [f"prompt[{i}]" for i in range(len(prompts))] if is_list else ["prompt"]
        encoding = manager.encode(dict(zip(names, prompts, strict=True)), body.add_special_tokens)
        ids = await unless_client_leaves(request.receive, encoding)
        counts = [len(item) for item in ids]
        answer = {
            "tokens": ids if is_list else ids[0],
            "count": counts if is_list else counts[0],
            "max_model_len": manager.limits.max_req_len,
        }
        return await answer_response(request, answer)

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeReqInput))
    async def detokenize(request: Request) -> Response:
        """Text of token ids, or of each list of a list."""
        manager = state.ready_manager
        raw = await read_body(request, state.server_args.max_request_bytes)
        tokens = await in_thread_if_large(lambda: check_detokenize(raw, manager.limits), len(raw))

        def decode(ids: list[int]) -> str:
            return manager.tokenizer.decode(ids, tokens.skip_special_tokens)

        decoding = map_texts(decode, tokens.lists, sum(map(len, tokens.lists)))
        texts = await unless_client_leaves(request.receive, decoding)
        answer = texts if tokens.is_list else texts[0]
        return json_response({"text": answer, "prompt": answer})  # SGLang's name and vLLM's
