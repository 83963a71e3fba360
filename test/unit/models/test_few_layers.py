"""A model of few layers has those kinds of layers that the whole model begins and ends with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.models.qwen2 import qwen_windows

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("entries", "windows"),
    [
        ({}, (None, None)),
        ({**WINDOW, "max_window_layers": 20}, (None, 64)),
        ({**WINDOW, "max_window_layers": 28}, (None, None)),
        ({**WINDOW, "max_window_layers": 0}, (64, 64)),
        ({**WINDOW, "layer_types": [FULL] * 20 + [SLIDING] * 8}, (None, 64)),
        ({**WINDOW, "layer_types": [SLIDING, FULL] * 14}, (64, None)),
    ],
)
def test_first_and_last_layer_keep_their_windows(
    entries: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    demo = load_model_config(str(resolve_model_path("demo")))
    whole = replace(demo, num_layers=28, hf={**demo.hf, **entries})
    assert qwen_windows(whole.with_layers(2)) == windows
    assert qwen_windows(whole)[::27] == windows
    assert whole.with_layers(2).num_layers == 2
