"""Llama (arXiv 2407.21783, section 3.2) and models of the same form."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import compute_logits
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.transformer import Decoder


class LlamaForCausalLM(nn.Module):
    """Parameters bear the checkpoint's names; see `model_loader` for the fused ones."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        if config.rope_scaling is not None:
            raise ValueError(
                f"RoPE scaling {config.rope_scaling} is not supported; use a checkpoint without"
                " rope_scaling."
            )
        bias = bool(config.hf.get("attention_bias", False))
        if bias or config.hf.get("mlp_bias", False):
            raise ValueError("Llama checkpoints with attention_bias or mlp_bias are not supported.")
        self.model = Decoder(config, max_positions, attention_bias=bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of the rows in `batch.logits_index`."""
        return compute_logits(self.model(batch, attention), self.lm_head.weight, batch)
