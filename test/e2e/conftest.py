"""Engines and servers that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pause_target import TARGETS, Target, open_target
from serving_utils import RunningServer, running_server


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """An engine to pause, or a server."""
    with open_target(request.param) as target:
        yield target


@pytest.fixture(scope="session")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="session")
def openai_server(request_log: Path) -> Iterator[RunningServer]:
    """A server of the demo model that writes down its requests."""
    flags = ("--served-model-name", "tiny", "--tool-call-parser", "hermes")
    flags += ("--reasoning-parser", "qwen3", "--log-requests", "--log-requests-level", "2")
    with running_server("demo", *flags, "--log-requests-target", str(request_log)) as running:
        yield running
