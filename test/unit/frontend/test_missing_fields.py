"""Fields that a body must have and has not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.frontend.body_parsing import struct_of
from sglang.srt.frontend.errors import RequestError


class Part(msgspec.Struct):
    type: str


class Body(msgspec.Struct):
    name: str
    parts: list[Part] = []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": None}, "name"),
        ({"name": "a", "parts": [{"type": "x"}, {}]}, "parts[1].type"),
    ],
)
def test_a_missing_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        struct_of(body, Body, {})
    assert (refused.value.field, str(refused.value)) == (field, f"{field}: is required.")
