"""Qwen3, dense (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.qwen2 import qwen_windows
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class Qwen3ForCausalLM(CausalLM):
    """Qwen2's windows, normalized queries and keys, and as a rule no biases."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        bias = config.flag("attention_bias")
        spec = DecoderSpec(
            qkv_bias=bias, output_bias=bias, qk_norm=True, windows=qwen_windows(config)
        )
        super().__init__(config, max_positions, spec)
