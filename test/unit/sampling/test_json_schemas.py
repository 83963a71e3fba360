"""Schemas without what a grammar does not need: shorter, and the same texts have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_cases import matches_schema
from sglang.srt.sampling.json_schemas import (
    KEPT_FORMATS,
    keepable,
    without_annotations,
    without_nulls,
)

WORDS = "What it means. " * 10
NOTES = {
    "description": WORDS,
    "title": WORDS,
    "examples": [WORDS],
    "$comment": WORDS,
    "default": {"title": WORDS},
}
NUMBER, TEXT = {"type": "integer", **NOTES}, {"type": "string", **NOTES}
KEPT_VALUE = {"title": "x", "default": 1}


def an_object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, **NOTES}


VALUES = [
    {},
    {"title": 1},
    {"title": 1, "description": "a", "default": [2]},
    {"title": "a", "description": "a", "default": [2]},
    {"title": 1, "description": "a", "default": ["b"]},
    {"v": KEPT_VALUE},
    {"v": {}},
    {"v": 3},
    {"v": "a"},
    {"v": [1, "a"]},
    {"v": ["a", 1]},
    {"examples": 1},
    {"examples": "a"},
    {"v": 1, "other": "a"},
    {"v": 1, "other": 1},
]
SCHEMAS = {
    "names": an_object(title=NUMBER, description=TEXT, default={"type": "array", "items": NUMBER}),
    "values": an_object(v={"enum": [KEPT_VALUE, "a"], **NOTES}),
    "one value": an_object(v={"const": KEPT_VALUE, **NOTES}),
    "one of": an_object(v={"anyOf": [NUMBER, TEXT], **NOTES}),
    "a tuple": an_object(v={"type": "array", "prefixItems": [NUMBER, TEXT], **NOTES}),
    "a pattern": {"type": "object", "patternProperties": {"examples": NUMBER}, **NOTES},
    "others": {**an_object(v=NUMBER), "additionalProperties": TEXT},
    "a definition": {
        **an_object(v={"$ref": "#/$defs/title", **NOTES}),
        "$defs": {"title": NUMBER, "description": an_object(v=TEXT)},
    },
    "an older definition": {
        **an_object(v={"$ref": "#/definitions/default"}),
        "definitions": {"default": TEXT},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_for_the_model_is_left_out_and_nothing_else(name: str) -> None:
    schema = SCHEMAS[name]
    before = json.dumps(schema)
    found = without_annotations(schema)
    assert json.dumps(schema) == before
    assert WORDS not in json.dumps(found)
    texts = [json.dumps(value) for value in VALUES]
    expected = [matches_schema(schema)(text) for text in texts]
    assert [matches_schema(found)(text) for text in texts] == expected
    assert set(expected) == {False, True}


def test_a_property_is_no_annotation_whatever_its_name() -> None:
    schema = {"properties": {name: {"description": "x"} for name in NOTES}}
    assert without_annotations(schema) == {"properties": {name: {} for name in NOTES}}


@pytest.mark.parametrize("schema", [{}, {"properties": 5}, {"items": True}, {"allOf": [3]}])
def test_what_is_no_schema_stays(schema: dict[str, Any]) -> None:
    assert without_annotations(schema) == schema


def test_no_depth_is_too_much() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(5000):
        schema = {"items": schema}
    found, depth = without_annotations(schema), 0
    while "items" in found:
        found, depth = found["items"], depth + 1
    assert (found, depth) == ({"type": "null"}, 5000)


UNKNOWN = ("password", "path", "binary", "byte", "uuid4", "regex", "int32", "date-Time", "")
WITH_FORMATS = an_object(format={"type": "string"}, secret={"type": "string", "format": "uuid4"})


def test_formats_that_nobody_knows_are_left_out_and_no_property_of_that_name() -> None:
    for name in UNKNOWN:
        item = {"type": ["string", "null"], "format": name}
        assert keepable({"items": item}) == {"items": {"type": ["string", "null"]}}
    assert keepable({"enum": [{"format": "path"}]}) == {"enum": [{"format": "path"}]}
    found = keepable(WITH_FORMATS)["properties"]
    assert found == {"format": {"type": "string"}, "secret": {"type": "string"}}
    for name in KEPT_FORMATS:
        assert keepable({"format": name}) == {"format": name}


def test_keywords_that_are_null_are_not_given() -> None:
    schema = {"type": "object", "required": None, "properties": {"required": {"pattern": None}}}
    expected = {"type": "object", "properties": {"required": {}}}
    assert without_nulls(schema) == keepable(schema) == expected
    kept = {"const": None, "default": None, "enum": [None], "properties": {"a": True}}
    assert without_nulls(kept) == kept
