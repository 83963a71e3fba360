"""Mistral (arXiv 2310.06825, section 2)."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class MistralForCausalLM(CausalLM):
    """Llama's form; the first releases have one sliding window in all layers."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        if config.hf.get("layer_types") is not None:
            raise config.refusal(
                "layer_types are not supported in a Mistral, whose layers share one sliding_window;"
                " remove the entry to serve it so"
            )
        window = config.integer("sliding_window", None, minimum=1)
        windows = (window,) * config.num_layers
        super().__init__(config, max_positions, DecoderSpec(windows=windows))
