"""`/openapi.json`: the routes read raw bodies, so their schemas come from the message structs."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI

from sglang.srt.control.validation import AbortBody
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.frontend.generate_body import GenerateReqInput
from sglang.srt.frontend.tokenizer_bodies import DetokenizeReqInput, TokenizeReqInput
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
from sglang.srt.sampling.sampling_params import SamplingParams

BODIES = (
    AbortBody,
    CommitWeightUpdateReqInput,
    CompletionRequest,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    DetokenizeReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    TokenizeReqInput,
    SamplingParams,
)
REF = "#/components/schemas/{name}"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
ERRORS = {
    "400": "The request breaks a rule; `param` names the field.",
    "401": "The route needs another key.",
    "403": "A web page of another origin sent the request.",
    "413": "The body is too large.",
    "503": "The server is starting, full, stopping or broken; try again later.",
}


def body_of(struct: type[msgspec.Struct], required: bool = True) -> dict[str, Any]:
    """What documents a route's JSON body."""
    schema = {"$ref": REF.format(name=struct.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


def install_openapi(app: FastAPI) -> None:
    """Adds the bodies' schemas and the errors to what FastAPI finds out by itself."""
    make_base = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = make_base()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_body_schemas(), Error=ERROR_SCHEMA)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"].update(_error_responses())
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _body_schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=REF)
    return schemas


def _error_responses() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    return {code: {"description": text, "content": content} for code, text in ERRORS.items()}
