"""The draft head of EAGLE (arXiv 2401.15077, section 3.1) and EAGLE-2 for Llama."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, hidden_of, layer_spec, wanted_rows
from sglang.srt.models.transformer import AttentionAndMLP

FC_BIAS = "fc.bias"


class LlamaForCausalLMEagle(DraftHead):
    """Reads each row's token beside the target's last normalized hidden state of the row before, or
    in draft steps its own output; gives that row's hidden state, as the target's head reads it."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        self.hidden_width = size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=True)
        self.layers = nn.ModuleList([AttentionAndMLP(config, 0, layer_spec(config))])
        self.checkpoint_names = self.names(zero_if_missing=frozenset({FC_BIAS}))

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        hidden = hidden_of(batch, (self.hidden_width,))
        x = self.fc(torch.cat((self.embed(batch.input_ids), hidden), dim=-1), runtime)
        rotation = runtime.rotation(self.rotary.table)
        x, residual = self.layers[0](x, x, rotation, runtime, wanted_rows(batch, capture))
        return ModelOutput(x + residual)

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        return self.shared_logits(hidden, runtime)
