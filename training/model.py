"""A plain Llama for training, whose parameter names are those of the shipped Hugging Face layout.

Pre-norm decoder (RMSNorm, Zhang & Sennrich 2019), rotary positions in the rotate-half layout
(RoFormer, Su et al. 2021, section 3.4), grouped-query attention (Ainslie et al. 2023), SwiGLU
feed-forward (Shazeer 2020), tied input and output embedding (Press & Wolf 2017).
Shapes in docstrings: B sequences, T positions, D hidden, H query heads, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the model; the defaults are the frozen shape of every demo base model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 4096
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaShape:
        """Read the sizes out of a config.json dictionary; other keys are ignored."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [max_position_embeddings, head_dim] float32, halves repeated."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, head_dim]; cos and sin [T or (B, 1, T), head_dim] float32. Keeps dtype."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention without biases, through PyTorch's fused SDPA."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]; mask None (causal) or additive, broadcast to [B, H, T, T]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = apply_rope(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = apply_rope(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each with a norm before and a residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The decoder. `forward` gives hidden states; `logits` projects them by the tied embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; projections back into the residual stream start at zero."""
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """tokens [B, T] int64 -> final hidden states [B, T, D] float32.

        positions [B, T] int64 (None: 0..T-1); mask additive [B or 1, 1, T, T] (None: causal).
        """
        if positions is None:
            cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def next_token_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; tokens, targets [B, T] int64, target -100 is not counted."""
        logits = self.logits(self(tokens)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def to_hf_state_dict(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Tensors under LlamaForCausalLM's names, on the CPU; the tied head is not repeated."""
        return {
            f"model.{name}": tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in self.state_dict().items()
        }

    @classmethod
    def from_hf_folder(cls, folder: Path) -> Llama:
        """Load a shipped folder (config.json, model.safetensors) into float32 parameters."""
        shape = LlamaShape.from_config(json.loads((folder / "config.json").read_text()))
        model = cls(shape)
        tensors = load_file(folder / "model.safetensors")
        model.load_state_dict({k.removeprefix("model."): v.float() for k, v in tensors.items()})
        return model
