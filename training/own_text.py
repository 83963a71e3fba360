"""Text that a model writes itself: continuations of many windows at once, with a KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from training.model import Attention, Llama, apply_rope
from training.tokens import MASK_ID, training_windows


class _Cache:
    """Keys and values of one layer, [B, KV heads, T, head_dim] each."""

    def __init__(self, attention: Attention, keys: Tensor, values: Tensor) -> None:
        self.attention, self.keys, self.values = attention, keys, values

    def attend(self, x: Tensor, position: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Stores the row x [B, 1, D] at a position, and gives what it reads [B, 1, D]."""
        attention = self.attention
        heads = (*x.shape[:-1], -1, attention.head_dim)
        q = apply_rope(attention.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = apply_rope(attention.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        self.keys[:, :, position] = k[:, :, 0].to(self.keys.dtype)
        self.values[:, :, position] = attention.v_proj(x).view(heads)[:, 0].to(self.values.dtype)
        seen = slice(position + 1)
        read = F.scaled_dot_product_attention(
            q.to(self.keys.dtype), self.keys[:, :, seen], self.values[:, :, seen], enable_gqa=True
        )
        return attention.o_proj(read.transpose(1, 2).flatten(2))


@torch.no_grad()
def continue_windows(
    model: Llama,
    windows: Tensor,
    prompt_lens: Tensor,
    temperatures: Tensor,
    generator: torch.Generator,
    label: str | None = None,
) -> Tensor:
    """Windows whose tokens behind the prompts are the model's own.

    On a GPU in bfloat16. The mask token is never chosen.

    Args:
        windows: [B, T] int64; the first tokens are the prompts.
        prompt_lens: [B] int64, at least 1.
        temperatures: [B] float32; 0 is greedy.
        generator: of the sampling noise.
        label: shows a progress bar.

    Returns:
        [B, T] int64.
    """
    batch, length = windows.shape
    on_gpu = windows.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size = (batch, model.shape.num_key_value_heads, length, model.shape.head_dim)
    caches = []
    for layer in model.layers:
        keys, values = (torch.empty(size, dtype=dtype, device=windows.device) for _ in range(2))
        caches.append(_Cache(layer.self_attn, keys, values))
    text = windows.clone()
    is_greedy = temperatures[:, None] == 0
    scale = torch.where(is_greedy, 1.0, temperatures[:, None])
    steps = tqdm(range(length - 1), desc=label, unit="token", disable=label is None, leave=False)
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=on_gpu):
        for position in steps:
            cos, sin = model.cos[position : position + 1], model.sin[position : position + 1]
            x = model.embed_tokens(text[:, position : position + 1])
            for layer, cache in zip(model.layers, caches, strict=True):
                x = x + cache.attend(layer.input_layernorm(x), position, cos, sin)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = model.logits(model.norm(x))[:, 0].float()
            logits[:, MASK_ID] = float("-inf")
            noise = torch.rand(logits.shape, generator=generator, device=logits.device)
            gumbel = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
            chosen = torch.where(is_greedy, logits, logits / scale + gumbel).argmax(dim=-1)
            is_prompt = position + 1 < prompt_lens
            text[:, position + 1] = torch.where(is_prompt, windows[:, position + 1], chosen)
    return text


def mixed_windows(
    real: Tensor,
    own: Tensor,
    num_real: int,
    num_own: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Endless batches [num_real + num_own, context] int64 of both kinds of text.

    Args:
        real: [N] int32, a stream of real text.
        own: [W, context] int16, windows that a model continued, on the same device.
    """
    context = own.shape[1]
    windows = training_windows(real, context, max(num_real, 1), generator)
    while True:
        chosen = torch.randint(len(own), (num_own,), generator=generator, device=own.device)
        inputs, _ = next(windows)
        yield torch.cat((inputs[:num_real], own[chosen].long()))
