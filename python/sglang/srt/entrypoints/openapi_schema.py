"""`/openapi.json`: the routes read raw bodies, so their schemas come from the message structs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

REF = "#/components/schemas/{name}"
SCHEMAS = "x-schemas"  # of a route, until the document is made: the schemas of its body
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
                "code": {"type": ["integer", "string"]},
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


def body_of(
    struct: type[msgspec.Struct],
    required: bool = True,
    refers_to: Sequence[type[msgspec.Struct]] = (),
    takes_others: bool = False,
    more: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Documents a route's JSON body: FastAPI's `openapi_extra`.

    Args:
        refers_to: other structs whose schemas the body's fields name; none takes unknown fields.
        takes_others: unknown fields are no error.
        more: what types cannot say, by the name of a struct: schemas of fields in `properties`, and
            other keywords of JSON Schema.
    """
    (schema, *_), schemas = msgspec.json.schema_components([struct, *refers_to], ref_template=REF)
    for name, found in schemas.items():
        if "properties" in found and not (takes_others and name == struct.__name__):
            found["additionalProperties"] = False
    for name, keywords in (more or {}).items():
        schemas[name]["properties"] |= keywords.get("properties", {})
        schemas[name] |= {key: keywords[key] for key in keywords.keys() - {"properties"}}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}, SCHEMAS: schemas}


def install_openapi(app: FastAPI) -> None:
    """Adds the bodies' schemas and the errors to what FastAPI finds out by itself."""
    make_base = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = make_base()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR_SCHEMA
        for route in app.routes:
            if isinstance(route, APIRoute) and route.openapi_extra:
                schemas.update(route.openapi_extra[SCHEMAS])
        for operations in document["paths"].values():
            for operation in operations.values():
                operation.pop(SCHEMAS, None)  # a copy without the defaults that are null
                operation["responses"].pop("422", None)
                operation["responses"].update(_error_responses())
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _error_responses() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    return {code: {"description": text, "content": content} for code, text in ERRORS.items()}
