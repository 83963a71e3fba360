"""A model's own layer for multi-token prediction (arXiv 2412.19437, section 2.2), as a head."""

from __future__ import annotations

import torch

from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, head_config, layer_spec
from sglang.srt.models.transformer import DecoderLayer, RMSNorm


class LlamaForCausalLMNextN(DraftHead):
    """Reads each row's token beside the target's last normalized hidden state of the row before, or
    in draft steps its own output, each after a norm; gives that row's normalized hidden state, as
    the target's head reads it."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        head = head_config(config)
        super().__init__(config, max_positions, DecoderLayer(head, 0, layer_spec(head)))
        self.hidden_width = size = head.hidden_size
        self.embedding_norm = RMSNorm(size, head.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, head.rms_norm_eps)
        self.fc = Linear(2 * size, size, bias=head.fc_bias)
        self.norm = RMSNorm(size, head.rms_norm_eps)
        self._hidden_first = head.layout.hidden_first

    def first_input(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded, _ = self.embedding_norm(embedded, None, runtime)
        hidden, _ = self.hidden_norm(hidden, None, runtime)
        both = (hidden, embedded) if self._hidden_first else (embedded, hidden)
        return self.fc(torch.cat(both, dim=-1), runtime), None

    def carried(
        self, x: torch.Tensor, residual: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x, residual, runtime)[0]
        return normed
