"""Llama (arXiv 2407.21783, section 3.2) and models of the same form."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class LlamaForCausalLM(CausalLM):
    """The plain form; some checkpoints have biases."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        bias = config.flag("attention_bias")
        spec = DecoderSpec(qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
        super().__init__(config, max_positions, spec)
