"""Blocks that decoder-only models are declared from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.linear import FusedLinear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, rotate
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class RMSNorm(nn.Module):
    """Root mean square normalization (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) over the paged KV pool."""

    def __init__(self, config: ModelConfig, layer: int, bias: bool) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            ("q_proj", "k_proj", "v_proj"),
            (q_size, kv_size, kv_size),
            bias,
        )
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        num_qk = self.num_heads + self.num_kv_heads
        rotated = rotate(heads[:, :num_qk], cos_sin)
        out = attention.forward(
            self.layer,
            rotated[:, : self.num_heads],
            rotated[:, self.num_heads :],
            heads[:, num_qk:],
        )
        return self.o_proj(out)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = FusedLinear(
            config.hidden_size, ("gate_proj", "up_proj"), (size, size), bias=False
        )
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, attention_bias: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, attention_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token embedding, layers and last norm: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig, max_positions: int, attention_bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, attention_bias) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope_theta)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the batch, after the last norm."""
        x = self.embed_tokens(batch.input_ids)
        cos_sin = self.rotary.lookup(batch.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos_sin, attention)
        return self.norm(x)
