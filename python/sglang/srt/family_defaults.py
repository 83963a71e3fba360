"""What transformers takes for entries that a config.json leaves out, by `model_type`; no torch."""

from __future__ import annotations

from typing import Any

_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Sizes of the weights are no defaults: a config.json without them is not this model's.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_QWEN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, **_QWEN},
}


def with_family_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json over the defaults of its family. A null entry stays null, as transformers has
    it: only what is missing is filled in."""
    family = config.get("model_type")
    return {**(FAMILY_DEFAULTS.get(family, {}) if isinstance(family, str) else {}), **config}
