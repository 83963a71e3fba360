"""Routes of trainers' own SGLang that have nothing to do here, or that cannot be had."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang.srt.control.body_reading import make_body
from sglang.srt.control.inspection_bodies import PostProcessWeightsReqInput
from sglang.srt.entrypoints.http_io import json_response, read_body, update_failure
from sglang.srt.entrypoints.openapi_schema import body_of
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.frontend.body_parsing import parse_json_object
from sglang.srt.frontend.errors import RequestError

NOTHING_TO_DO = "Updates of weights in fp8 are rounded as they are read: there is nothing to do."
NO_PULL = (
    "pull_weights: this server keeps no checkpoint that deltas could be applied to. Let the trainer"
    " send whole weights: slime's --update-weight-mode full, by --update-weight-transport nccl or"
    " disk."
)
NO_ADAPTERS = (
    "There are no adapters here: merge this one into the weights, and send those by"
    " /update_weights_from_disk, /update_weights_from_distributed or /update_weights_from_tensor."
)
REFUSED_CALLS = {
    "/pull_weights": RequestError(None, NO_PULL, 501),  # slime's updates by deltas of a checkpoint
    "/load_lora_adapter": RequestError(None, NO_ADAPTERS),
    "/load_lora_adapter_from_tensors": RequestError(None, NO_ADAPTERS),
    "/unload_lora_adapter": RequestError(None, NO_ADAPTERS),
}
TRAINER_PATHS = ("/post_process_weights", *REFUSED_CALLS)


def add_trainer_routes(app: FastAPI, state: ServerState) -> None:
    """Adds `TRAINER_PATHS`."""

    @app.post("/post_process_weights", openapi_extra=body_of(PostProcessWeightsReqInput, False))
    async def post_process_weights(request: Request) -> Response:
        """Prepares quantized weights for an update, or for use after one; updates do so here."""
        raw = await read_body(request, state.server_args.max_request_bytes)
        try:
            make_body(PostProcessWeightsReqInput, parse_json_object(raw if raw.strip() else b"{}"))
        except RequestError as error:
            return update_failure(error)
        return json_response({"success": True, "message": NOTHING_TO_DO})

    for path, error in REFUSED_CALLS.items():
        _add_refusal(app, path, error)


def _add_refusal(app: FastAPI, path: str, error: RequestError) -> None:
    @app.post(path, include_in_schema=False)
    async def refuse() -> Response:
        return update_failure(error)
