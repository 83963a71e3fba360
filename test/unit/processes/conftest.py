"""A target for heads that draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils import make_random_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, of 8 layers."""
    return make_random_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
