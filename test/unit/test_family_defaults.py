"""Entries that a config.json leaves out mean what they mean in transformers, in every family."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.model_loader.loader import WeightPlaces
from sglang.srt.models.model import Model
from sglang.srt.registry import FAMILY_DEFAULTS, MODELS

# 64 heads: every family's default number of heads of keys and values divides them.
FULL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 1,
    "rope_theta": 50_000.0,
}
SIZES = {"vocab_size", "hidden_size", "intermediate_size"} | {
    "num_hidden_layers",
    "num_attention_heads",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OPTIONAL = sorted({"architectures", *FULL} - SIZES)
# MiMo is none of transformers: it is Qwen2 with a layer for drafts.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def write_config(path: Path, family: str, without: list[str], **changes: Any) -> None:
    architectures = [ARCHITECTURES[family]]
    entries = {"model_type": family, "architectures": architectures, **FULL, **changes}
    if family in ("mixtral", "qwen3_moe"):
        entries |= EXPERTS
    for name in without:
        del entries[name]
    if "max_window_layers" in without:
        entries["num_hidden_layers"] = 30  # the default is less
    (path / "config.json").write_text(json.dumps(entries))


def of_experts(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Counts the values of all experts of a layer, which are one weight or many."""
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        layer, experts, _ = name.partition(".experts.")
        known = found.get(layer, [0])[0]
        found |= {layer: [known + math.prod(shape)]} if experts else {name: shape}
    return found


def facts_here(path: Path) -> dict[str, Any]:
    """Reads facts off the parsed config and the model that is built of it, without memory."""
    config: ModelConfig = load_model_config(str(path))
    with torch.device("meta"):
        model: Model = MODELS.load(config.architecture)(config, 64)
    places = WeightPlaces(model, config)
    return {
        "class": type(model).__name__,
        "weights": of_experts({name: list(places[name].shape) for name in places.names}),
        "windows": list(model.windows),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "context_len": config.context_len,
        "is_tied": config.tie_word_embeddings,
    }


def facts_of_transformers(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    known = {field.name for field in dataclasses.fields(config)}  # others have no effect
    window = config.sliding_window if "sliding_window" in known else None
    all_alike = ["sliding_attention"] * config.num_hidden_layers
    types = config.layer_types if "layer_types" in known else all_alike
    return {
        "class": type(model).__name__,
        "weights": of_experts(
            {name: list(weight.shape) for name, weight in model.named_parameters()}
        ),
        "windows": [window if name == "sliding_attention" else None for name in types],
        "rms_norm_eps": model.model.norm.variance_epsilon,
        "rope_theta": config.rope_parameters["rope_theta"],
        "context_len": config.max_position_embeddings,
        "is_tied": config.tie_word_embeddings,
    }


def test_every_family_is_tested() -> None:
    assert FAMILY_DEFAULTS.keys() == {*ARCHITECTURES, "mimo"}
    assert sorted([*ARCHITECTURES.values(), "MiMoForCausalLM"]) == MODELS.names
    mimo, qwen2 = (dict(FAMILY_DEFAULTS[name], architectures=[]) for name in ("mimo", "qwen2"))
    assert mimo == qwen2
    assert MODELS.load("MiMoForCausalLM") is MODELS.load("Qwen2ForCausalLM")


@pytest.mark.long_matrix
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("name", [None, *OPTIONAL, "all"])
def test_a_missing_entry_means_what_transformers_takes(
    tmp_path: Path, family: str, name: str | None
) -> None:
    without = OPTIONAL if name == "all" else [] if name is None else [name]
    write_config(tmp_path, family, without)
    assert facts_here(tmp_path) == facts_of_transformers(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "num_key_value_heads") for family in ("llama", "qwen2", "qwen3")),
        *((family, "head_dim") for family in ("llama", "mistral")),
        *((family, "sliding_window") for family in ("mistral", "qwen2", "qwen3")),
    ],
)
def test_a_null_entry_is_no_missing_one(tmp_path: Path, family: str, name: str) -> None:
    """Checks the entries that transformers lets be null."""
    write_config(tmp_path, family, without=[], **{name: None})
    assert facts_here(tmp_path) == facts_of_transformers(tmp_path)
