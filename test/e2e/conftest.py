"""Engines and servers that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pause_target import Target, open_target


@pytest.fixture(
    scope="session", params=["engine", "engine without overlap", "http", "http without overlap"]
)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """An engine to pause; flushed of what the test before has cached."""
    with open_target(request.param) as target:
        yield target
