"""The draft head of EAGLE (arXiv 2401.15077, section 3.1) and EAGLE-2 for Llama."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.head_config import FC_BIAS
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, head_config, layer_spec
from sglang.srt.models.transformer import AttentionAndMLP


class LlamaForCausalLMEagle(DraftHead):
    """Reads each row's token beside the target's last normalized hidden state of the row before, or
    in draft steps its own output; gives that row's hidden state, as the target's head reads it."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        head = head_config(config)
        super().__init__(config, max_positions, AttentionAndMLP(head, 0, layer_spec(head)))
        self.hidden_width = size = head.hidden_size
        self.fc = Linear(2 * size, size, bias=True)
        if not head.fc_bias:
            may_miss = frozenset({FC_BIAS})
            self.checkpoint_names = replace(self.checkpoint_names, zero_if_missing=may_miss)

    def first_input(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x: torch.Tensor = self.fc(torch.cat((embedded, hidden), dim=-1), runtime)
        return x, x

    def carried(
        self, x: torch.Tensor, residual: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        return x + residual
