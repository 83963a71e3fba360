"""Clients of every kind at once, over HTTP; longer by hand: `python test/http_storm.py`."""

from __future__ import annotations

import pytest

from http_storm import storm_over_http

pytestmark = pytest.mark.long_matrix

SECONDS = 3.0


def test_texts_and_memory_survive_a_storm_over_http() -> None:
    seen = storm_over_http(0, SECONDS)
    wanted = ("length", "cancelled", "wrong bodies", "pauses", "stops", "half-closed")
    lacking = [name for name in wanted if seen[name] == 0]
    assert not lacking, seen
