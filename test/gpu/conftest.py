"""Tests that are parametrised by attention backend skip those that this host has not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from sglang.srt.layers.attention.flashinfer_backend import why_not_here

FOLDER = Path(__file__).parent


def names_flashinfer(values: Iterable[object]) -> bool:
    """Tells whether one of a test's parameters is that backend, or a tuple with it."""
    return any(
        value == "flashinfer" or (isinstance(value, tuple) and "flashinfer" in value)
        for value in values
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not_here()
    if reason is None:
        return
    for item in items:
        call = vars(item).get("callspec")  # of what is parametrised
        if item.path.is_relative_to(FOLDER) and call and names_flashinfer(call.params.values()):
            item.add_marker(pytest.mark.skip(reason=reason))
