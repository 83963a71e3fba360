"""Qwen3 with a mixture of experts (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.sparse_mlp import ExpertSpec, expert_counts
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3's attention, with one sliding window in all layers or none, and experts in all layers
    or some."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        bias, window = config.flag("attention_bias"), None
        if config.flag("use_sliding_window"):
            window = config.integer("sliding_window", None, minimum=1)
        size = config.integer("moe_intermediate_size", None, minimum=1)
        if size is None:
            raise config.refusal("moe_intermediate_size, the size of an expert, is missing")
        num_experts, num_chosen = expert_counts(config, num_chosen=8)
        experts = ExpertSpec(
            num_experts=num_experts,
            size=size,
            num_chosen=num_chosen,
            normalizes=config.flag("norm_topk_prob"),
            dense_layers=_dense_layers(config),
        )
        spec = DecoderSpec(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            windows=(window,) * config.num_layers,
            experts=experts,
        )
        super().__init__(config, max_positions, spec)


def _dense_layers(config: ModelConfig) -> frozenset[int]:
    """Gives the layers that `mlp_only_layers` names, and those between every
    `decoder_sparse_step`-th one."""
    named = config.hf.get("mlp_only_layers") or []
    if not (isinstance(named, list) and all(type(each) is int for each in named)):
        raise config.refusal(f"mlp_only_layers must be a list of layers, not {named!r:.40}")
    step = config.integer("decoder_sparse_step", 1, minimum=1) or 1
    return frozenset(named) | {
        layer for layer in range(config.num_layers) if (layer + 1) % step != 0
    }
