"""Heads of several layers, with an embedding and an output head of their own, or of a nested config
draft through a scheduler: tokens are those of a server without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_heads import EAGLE, EAGLE3, FILE
from drafted_serving import nothing, serve
from eagle_models import EMBEDDING, OUTPUT_HEAD, write_models
from eagle_serving import Served, right_tokens, setup_for
from head_layouts import IDS, SPECULATORS

torch.set_num_threads(1)
NUM_STEPS = 3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


def with_silent_layer(tensors: dict[str, torch.Tensor]) -> None:
    """Adds a layer that adds next to nothing, so that drafts stay as right as they were."""
    first = {name: each for name, each in tensors.items() if name.startswith("layers.0.")}
    size = len(tensors["layers.0.post_attention_layernorm.weight"])
    for name, tensor in first.items():
        if name.endswith("hidden_norm.weight"):
            continue
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        values = tensor * (1e-3 if is_output else 1.0)
        tensors[name.replace("layers.0.", "layers.1.")] = (
            values[..., :size].clone()
            if ("q_proj" in name or "k_proj" in name or "v_proj" in name)
            else values
        )
    tensors.setdefault("layers.1.input_layernorm.weight", torch.ones(size))


def own_embedding(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Unlike the target's in a number."""
    tensors["embed_tokens.weight"] = load_file(target / FILE)[EMBEDDING].clone()
    tensors["embed_tokens.weight"][0, 1] += 0.01


def write_nested(folder: Path, source: Path, target: Path) -> Path:
    """As speculators writes it: 2 layers, `norm_before_residual`, the target's inputs by ids."""
    shape = json.loads((source / "config.json").read_text())
    own = {key: shape.pop(key) for key in ("draft_vocab_size", "norm_output")}
    entries = {**SPECULATORS, **own, "transformer_layer_config": shape, IDS: [2, 4, 5]}
    tensors = {
        name.replace("midlayer.", "layers.0."): each
        for name, each in load_file(source / FILE).items()
    }
    with_silent_layer(tensors)
    own_embedding(tensors, target)
    return write(folder, entries, tensors)


def write_eagle_of_two(folder: Path, source: Path, target: Path) -> Path:
    """As vLLM has EAGLE: 2 layers, `model.` before names, an embedding and an output head."""
    entries = json.loads((source / "config.json").read_text())
    tensors = load_file(source / FILE)
    with_silent_layer(tensors)
    own_embedding(tensors, target)
    named = {f"model.{name}": each for name, each in tensors.items()}
    named["lm_head.weight"] = load_file(target / FILE)[OUTPUT_HEAD] * 1.01
    return write(folder, {**entries, "architectures": ["EagleLlamaForCausalLM"]}, named)


def write(folder: Path, entries: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    save_file(tensors, folder / FILE)
    return folder


@pytest.mark.parametrize(("kind", "page_size"), [(EAGLE, 1), (EAGLE3, 16)])
def test_tokens_are_those_without_a_drafter(
    paths: dict[str, Path], kind: str, page_size: int, tmp_path: Path
) -> None:
    make = write_eagle_of_two if kind == EAGLE else write_nested
    folder = make(tmp_path / "head", paths[kind], paths["target"])
    setup = setup_for(NUM_STEPS, page_size)
    harness = Served({**paths, kind: folder}, kind, NUM_STEPS, setup)
    assert len(harness.group.memory.pools[1].kv) == 2
    serve(harness, right_tokens(paths["target"]), nothing)
    harness.check()
    harness.assert_many_of_each(least=10)
