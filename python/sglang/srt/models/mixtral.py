"""Mixtral (arXiv 2401.04088, section 2)."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.layers.experts import ExpertNames
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.sparse_mlp import ExpertSpec, expert_counts
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class MixtralForCausalLM(CausalLM):
    """Mistral's form with experts in all layers, whose weights sum to 1."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        window = config.integer("sliding_window", None, minimum=1)
        num_experts, num_chosen = expert_counts(config, num_chosen=2)
        experts = ExpertSpec(
            num_experts=num_experts,
            size=config.intermediate_size,
            num_chosen=num_chosen,
            normalizes=True,
            names=ExpertNames(gate="w1", up="w3", down="w2"),
        )
        spec = DecoderSpec(windows=(window,) * config.num_layers, experts=experts)
        super().__init__(config, max_positions, spec)
        # transformers names the layer's parts so in files that hold all experts in one tensor.
        layers = (f"model.layers.{layer}." for layer in range(config.num_layers))
        prefixes = tuple((f"{layer}block_sparse_moe.", f"{layer}mlp.") for layer in layers)
        self.checkpoint_names = replace(self.checkpoint_names, prefixes=prefixes)
