"""Leaves out of JSON schemas what a grammar does not need or cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # of schemas within schemas; deeper ones stay as they are
ANNOTATIONS = frozenset(("description", "title", "examples", "$comment", "default"))
SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
SCHEMAS = frozenset(
    (
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "contains",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    )
)


# Formats of texts that the grammar library keeps. JSON Schema lets all others be notes.
KEPT_FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    )
)

LeftOut = Callable[[str, Any], bool]  # of a keyword and its value


def without_annotations(schema: Any) -> Any:
    """Returns a schema, or a list of some, that takes what the given one takes."""
    return _without(schema, lambda keyword, _: keyword in ANNOTATIONS)


def without_nulls(schema: Any) -> Any:
    """Returns a schema without keywords that are null, which say nothing; `const` may be null."""
    return _without(schema, _is_null)


def keepable(schema: Any) -> Any:
    """Leaves out nulls and formats that the grammar library does not know."""
    return _without(schema, lambda *entry: _is_null(*entry) or _is_note(*entry))


def _is_null(keyword: str, value: Any) -> bool:
    return value is None and keyword not in ("const", "default")


def _is_note(keyword: str, value: Any) -> bool:
    return keyword == "format" and isinstance(value, str) and value not in KEPT_FORMATS


def _without(schema: Any, is_left_out: LeftOut, depth: int = 0) -> Any:
    """Names and values of the client's, such as those of `properties` and `enum`, stay."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_without(item, is_left_out, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_in(key, value, is_left_out, depth + 1)
        for key, value in schema.items()
        if not is_left_out(key, value)
    }


def _without_in(key: str, value: Any, is_left_out: LeftOut, depth: int) -> Any:
    """Returns the value of a keyword."""
    if key in SCHEMAS:
        return _without(value, is_left_out, depth)
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _without(each, is_left_out, depth) for name, each in value.items()}
    return value
