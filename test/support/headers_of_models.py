"""Folders of models whose weights are zeros, written without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Shapes = dict[str, list[int]]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_shard(path: Path, shapes: Shapes, dtype: str = "BF16") -> None:
    """Writes a safetensors file: the length of its header, the header, zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (2 if dtype.endswith("16") else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_model(folder: Path, entries: dict[str, Any], shapes: Shapes) -> str:
    """Writes config.json, one file of weights, and an empty tokenizer; returns the folder."""
    (folder / "config.json").write_text(json.dumps(entries))
    (folder / "tokenizer.json").write_text("{}")
    write_shard(folder / "model.safetensors", shapes)
    return str(folder)
