"""What a grammar needs of a function's JSON schema: all but what is written for the model."""

from __future__ import annotations

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


def without_annotations(schema: Any, depth: int = 0) -> Any:
    """A schema, or a list of some, that takes what the given one takes. Names and values of the
    client's, such as those of `properties` and `enum`, stay as they are."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [without_annotations(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_annotations_in(key, value, depth + 1)
        for key, value in schema.items()
        if key not in ANNOTATIONS
    }


def _without_annotations_in(key: str, value: Any, depth: int) -> Any:
    """The value of a keyword."""
    if key in SCHEMAS:
        return without_annotations(value, depth)
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: without_annotations(each, depth) for name, each in value.items()}
    return value
