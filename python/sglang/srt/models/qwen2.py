"""Qwen2 and Qwen2.5 (arXiv 2407.10671, section 2.2.1)."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.transformer import CausalLM, DecoderSpec

FULL, SLIDING = "full_attention", "sliding_attention"


class Qwen2ForCausalLM(CausalLM):
    """Biases of q, k and v; upper layers may have a sliding window."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        spec = DecoderSpec(qkv_bias=True, windows=qwen_windows(config))
        super().__init__(config, max_positions, spec)


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, or else of the layers from `max_window_layers`
    on; none at all without `use_sliding_window`."""
    window = None
    if config.flag("use_sliding_window"):
        window = config.integer("sliding_window", None, minimum=1)
    types = config.hf.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", None, minimum=0)
        first = config.num_layers if first is None else first
        return tuple(window if layer >= first else None for layer in range(config.num_layers))
    if not isinstance(types, list) or len(types) != config.num_layers:
        raise config.refusal(f"layer_types must be a list of {config.num_layers} names")
    unknown = [name for name in types if name not in (FULL, SLIDING)]
    if unknown:
        raise config.refusal(
            f"layer type {unknown[0]!r} is not supported; use a checkpoint with {FULL} or {SLIDING}"
            " in layer_types"
        )
    if window is None and SLIDING in types:
        raise config.refusal(
            f"layer_types names {SLIDING} without a window; set use_sliding_window and"
            f" sliding_window, or name {FULL}"
        )
    return tuple(window if name == SLIDING else None for name in types)
