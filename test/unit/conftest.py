"""A small random model whose tokens repeat often, so that predictions are often right by chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils import make_random_llama

SMALL = {
    "vocab_size": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
    "mtp_mask_token_id": 5,
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tokens, the last of them the mask."""
    return make_random_llama(tmp_path_factory.mktemp("small"), seed=3, **SMALL)
