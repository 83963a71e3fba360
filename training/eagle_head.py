"""Draft heads for training: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840), and a layer for
multi-token prediction of the model itself (NEXTN; arXiv 2412.19437, section 2.2).

A head is one layer over the target's hidden states. Row p reads the token at position p + 1 beside
what the target computed at position p, and says the token at position p + 2. A draft step reads,
in place of the target's hidden state, what the head itself gave for the row before.
Parameter names are those of published checkpoints. Shapes in docstrings: B sequences, R rows of a
sequence, S rows that drafting starts from, D hidden size, V tokens of the head's output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import FeedForward, Llama, LlamaShape, RMSNorm, apply_rope, rope_tables

EAGLE, EAGLE3, NEXTN = "EAGLE", "EAGLE3", "NEXTN"
ALGORITHMS = (EAGLE, EAGLE3, NEXTN)
NUM_TAPS = 3


class HeadAttention(nn.Module):
    """Grouped-query attention without biases; its input may be wider than the hidden size."""

    def __init__(self, shape: LlamaShape, input_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns rotated queries [B, heads, T, head_dim] of x [B, T, input_size]."""
        return apply_rope(self._heads(self.q_proj(x)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values, each [B, KV heads, T, head_dim]."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return apply_rope(k, cos, sin), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class HeadLayer(nn.Module):
    """Attention and feed-forward, each added to a residual stream; no norm before attention."""

    def __init__(self, shape: LlamaShape, input_size: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(shape, input_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output [B, T, D] of a residual [B, T, D] and what the attention heads
        read [B, heads, T, head_dim]."""
        residual = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class NextNLayer(HeadLayer):
    """The same with a norm before attention: a layer as the target's."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, shape.hidden_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Eagle3Layer(HeadLayer):
    """Reads embedding and hidden state side by side, each behind a norm of its own."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


def attend(
    q: Tensor, past: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], starts: Tensor
) -> Tensor:
    """Attention of draft rows.

    Args:
        q: [B, heads, S, head_dim]; row i belongs to the drafting that starts at row starts[i].
        past: keys and values [B, KV heads, R, head_dim] of the rows that read the target's hidden
            states; those up to starts[i] are seen.
        own: keys and values [B, KV heads, S, head_dim] of the draft steps so far, this one
            included; each row sees its own drafting's.
        starts: [S] int64.

    Returns:
        [B, heads, S, head_dim].
    """
    k, v = past
    num_kv_heads, num_rows, head_dim = k.shape[1:]
    grouped = q.unflatten(1, (num_kv_heads, -1)) * head_dim**-0.5
    scores = (grouped.flatten(2, 3) @ k.transpose(2, 3)).view(*grouped.shape[:4], num_rows).float()
    later = torch.arange(num_rows, device=q.device) > starts[:, None]
    parts = [scores.masked_fill(later, float("-inf"))]
    parts += [(grouped * key[:, :, None]).float().sum(dim=-1, keepdim=True) for key, _ in own]
    shares = torch.cat(parts, dim=-1).softmax(dim=-1).to(v.dtype)
    read = (shares[..., :num_rows].flatten(2, 3) @ v).view(grouped.shape)
    for step, (_, value) in enumerate(own):
        read = read + shares[..., num_rows + step, None] * value[:, :, None]
    return read.flatten(1, 2)


class DraftHead(nn.Module):
    """Holds what all heads share; subclasses say how rows enter the layer and what follows."""

    cos: Tensor
    sin: Tensor
    target_ids: Tensor  # [V] int64; the target's ids of this head's tokens
    is_said: Tensor  # [vocab_size] bool; which of the target's tokens those are

    def __init__(self, shape: LlamaShape, target_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        is_said = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_said[target_ids] = True
        self.register_buffer("is_said", is_said, persistent=False)

    @property
    def layer(self) -> HeadLayer:
        """Returns its one layer."""
        raise NotImplementedError

    def combine(self, features: Tensor) -> Tensor:
        """Returns hidden inputs [..., D] of what `read_target` gives for this head."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what attention reads [..., input size], and the residual [..., D], of token
        embeddings and hidden inputs, [..., D] each."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> Tensor:
        """Returns what `forward` gives [..., D] of the layer's output [..., D]."""
        return x

    def logits(self, carried: Tensor, output: Tensor) -> Tensor:
        """Returns [..., V] of what `forward` gives; output [vocab_size, D] is the target's head."""
        return F.linear(carried, output)

    def _initialise(self) -> None:
        """Draws normal weights; projections back into the residual stream start at zero."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Runs all rows of sequences, each with the hidden input that it is given: embedded and
        hidden [B, R, D] -> [B, R, D], the hidden inputs of the draft steps after them."""
        layer, num_rows = self.layer, embedded.shape[1]
        x, residual = self.enter(embedded, hidden)
        rotation = self.cos[:num_rows], self.sin[:num_rows]
        q = layer.self_attn.queries(x, *rotation)
        k, v = layer.self_attn.keys_values(x, *rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.leave(layer.finish(residual, attended))

    def unroll(
        self, embedded: Tensor, hidden: Tensor, starts: Tensor, num_steps: int
    ) -> list[Tensor]:
        """Drafts from S rows of a known text at once, feeding the text's tokens ("training-time
        test", arXiv 2503.01840, section 3.1).

        Step 1 of draft i is row starts[i], which reads the target's hidden state. Step j is the row
        j - 1 places later: it reads the output of step j - 1, and attends to rows up to starts[i]
        and to the steps between, like a request that has drafted j - 1 tokens.

        Args:
            embedded: [B, R, D]; embeddings of the token after each row.
            hidden: [B, R, D]; see `combine`.
            starts: [S] int64, each below R - num_steps + 1.

        Returns:
            [B, S, D] of each step, as `forward` gives it.
        """
        layer, num_rows = self.layer, embedded.shape[1]
        x, residual = self.enter(embedded, hidden)
        past = layer.self_attn.keys_values(x, self.cos[:num_rows], self.sin[:num_rows])
        x, residual = x[:, starts], residual[:, starts]
        own: list[tuple[Tensor, Tensor]] = []
        given: list[Tensor] = []
        for step in range(num_steps):
            places = starts + step
            rotation = self.cos[places], self.sin[places]
            if step:
                x, residual = self.enter(embedded[:, places], given[-1])
                own.append(layer.self_attn.keys_values(x, *rotation))
            attended = attend(layer.self_attn.queries(x, *rotation), past, own, starts)
            given.append(self.leave(layer.finish(residual, attended)))
        return given


class EagleHead(DraftHead):
    """EAGLE: reads the target's last hidden state behind its norm, and says the next one of them,
    which the target's own output head reads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, torch.arange(shape.vocab_size))
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape, shape.hidden_size)])
        self._initialise()

    @property
    def layer(self) -> HeadLayer:
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        return layer

    def combine(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embedded, hidden), dim=-1)).float()  # the residual, under autocast
        return x, x


class NextNHead(DraftHead):
    """NEXTN: reads the target's last hidden state behind its norm, and gives the next one of them,
    as EAGLE does, with norms around it and a layer as the target's. The names are Qwen3-Next's."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, torch.arange(shape.vocab_size))
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([NextNLayer(shape)])
        self.norm = RMSNorm(size, eps)
        self._initialise()

    @property
    def layer(self) -> NextNLayer:
        layer = self.layers[0]
        assert isinstance(layer, NextNLayer)
        return layer

    def combine(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(both, dim=-1)).float()  # the residual, under autocast
        return self.layer.input_layernorm(x), x

    def leave(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Eagle3Head(DraftHead):
    """EAGLE-3: reads the residual stream of the target in three places, and says tokens of a small
    vocabulary of its own.

    Args:
        target_ids: [V] int64, ascending; the target's tokens that it says.
    """

    def __init__(self, shape: LlamaShape, target_ids: Tensor) -> None:
        super().__init__(shape, target_ids)
        size = shape.hidden_size
        self.fc = nn.Linear(NUM_TAPS * size, size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RMSNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(target_ids), bias=False)
        self._initialise()

    @property
    def layer(self) -> HeadLayer:
        return self.midlayer

    def combine(self, features: Tensor) -> Tensor:
        return self.fc(features).float()

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
        return x, hidden

    def logits(self, carried: Tensor, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(carried))


def make_head(algorithm: str, target: Llama, target_ids: Tensor) -> DraftHead:
    """Makes a head to train for a target: with the target's layer sizes (NEXTN: smaller ones), and
    with its weights where they fit.

    Args:
        target_ids: [V] int64, ascending; the tokens that an EAGLE-3 head says.
    """
    shape = replace(target.shape, num_hidden_layers=1)
    if algorithm == EAGLE:
        return EagleHead(shape)
    if algorithm == NEXTN:
        return _smaller_layer(shape, target)
    head = Eagle3Head(shape, target_ids)
    with torch.no_grad():
        head.norm.weight.copy_(target.norm.weight)
        head.lm_head.weight.copy_(target.embed_tokens.weight[target_ids.to(target.cos.device)])
    return head


def _smaller_layer(shape: LlamaShape, target: Llama) -> NextNHead:
    """Makes a NEXTN head with half of the target's attention heads, and two thirds of its MLP."""
    head = NextNHead(
        replace(
            shape,
            num_attention_heads=shape.num_attention_heads // 2,
            num_key_value_heads=shape.num_key_value_heads // 2,
            intermediate_size=shape.intermediate_size * 2 // 3,
        )
    )
    with torch.no_grad():
        head.norm.weight.copy_(target.norm.weight)
    return head


def tap_layers(algorithm: str, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose inputs an EAGLE-3 head reads; none for others."""
    if algorithm != EAGLE3:
        return ()
    if num_layers < NUM_TAPS + 1:
        raise ValueError(f"An EAGLE-3 head needs a target of {NUM_TAPS + 1} layers or more.")
    return (1, num_layers // 2, num_layers - 1)


def read_target(target: Llama, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Computes what a target gives of tokens [B, T] int64.

    Returns:
        Its last hidden states behind the norm [B, T, D], and the features that a head reads: these
        again, or the inputs of the layers `taps` side by side [B, T, len(taps) * D].
    """
    cos, sin = target.cos[: tokens.shape[1]], target.sin[: tokens.shape[1]]
    x = target.embed_tokens(tokens)
    kept: list[Tensor] = []
    for index, layer in enumerate(target.layers):
        if index in taps:
            kept.append(x)
        x = layer(x, cos, sin, None)
    normed = target.norm(x)
    return normed, torch.cat(kept, dim=-1) if kept else normed
