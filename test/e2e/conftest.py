"""Engines and servers that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pause_target import TARGETS, Target, open_target


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """An engine to pause, or a server, whose front end knows nothing of overlap."""
    with open_target(request.param) as target:
        yield target
