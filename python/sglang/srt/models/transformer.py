"""Blocks that decoder-only models are declared from: a family is a `DecoderSpec`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.head_layouts import NATIVE_NAMES
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import HeadNorms, LayerRuntime
from sglang.srt.layers.linear import Embedding, FusedLinear, SumLinear, VocabLinear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.model import CheckpointNames, Model, SharedModules
from sglang.srt.models.sparse_mlp import ExpertSpec, SparseMLP

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The additions of a family to the plain form: no bias, no norm of queries and keys, full
    attention.

    Attributes:
        qkv_bias: the projections to queries, keys and values have biases.
        output_bias: the attention's output projection has one.
        mlp_bias: the gate, up and down projections have biases.
        qk_norm: an RMSNorm over each head of queries and of keys, before they are rotated.
        windows: sliding window of each layer (see `AttentionBackend`), None for full attention;
            empty if all layers are full.
        experts: of the feed-forward layers; None: none have any.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    experts: ExpertSpec | None = None


class RMSNorm(nn.Module):
    """Root mean square normalization of a sum, see `LayerOps.add_rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalized sum of x and residual, and the sum."""
        return runtime.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) over the paged KV pool, optionally with normalized
    queries and keys (arXiv 2302.05442, section 2.1, there with LayerNorm)."""

    def __init__(
        self, config: ModelConfig, layer: int, spec: DecoderSpec, input_size: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        shard, self.head_dim = config.shard, config.head_dim
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(
            input_size or config.hidden_size,
            ("q_proj", "k_proj", "v_proj"),
            (q_size, kv_size, kv_size),
            spec.qkv_bias,
            shard,
        )
        self.o_proj = SumLinear(q_size, config.hidden_size, spec.output_bias, shard)
        self.has_qk_norm = spec.qk_norm
        if spec.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        runtime: LayerRuntime,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, input_size] gives [T, hidden_size], or [S, hidden_size] of the rows `wanted` [S]
        int64 alone."""
        heads = self.qkv_proj(x, runtime).view(x.shape[0], -1, self.head_dim)
        attended = runtime.attend(self.layer, heads, rotation, self._norms())
        return self.o_proj(attended if wanted is None else attended[wanted], runtime)

    def store(self, x: torch.Tensor, rotation: torch.Tensor, runtime: LayerRuntime) -> None:
        """Stores K and V of x [T, input_size], and attends nothing."""
        heads = self.qkv_proj.without_first(x, runtime).view(x.shape[0], -1, self.head_dim)
        runtime.store(self.layer, heads, rotation, self._norms())

    def _norms(self) -> HeadNorms | None:
        if not self.has_qk_norm:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        size, shard = config.intermediate_size, config.shard
        self.gate_up_proj = FusedLinear(
            config.hidden_size, ("gate_proj", "up_proj"), (size, size), bias, shard
        )
        self.down_proj = SumLinear(size, config.hidden_size, bias, shard)

    def forward(self, x: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, runtime), runtime)


class AttentionAndMLP(nn.Module):
    """A layer after its first norm. Attention and feed-forward are each added to the residual
    where the norm after it reads the sum.

    Args:
        input_size: features that attention reads; None for the hidden size.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: DecoderSpec, input_size: int | None = None
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, spec, input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module
        if spec.experts is None or layer in spec.experts.dense_layers:
            self.mlp = GatedMLP(config, spec.mlp_bias)
        else:
            self.mlp = SparseMLP(config, spec.experts)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: torch.Tensor,
        runtime: LayerRuntime,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention reads x [T, input_size] and is added to residual [T, hidden_size]. Returns two
        tensors whose sum is the layer's output: [T, hidden_size], or [S, hidden_size] of the rows
        `wanted` [S] int64 alone. K and V of all rows are stored."""
        x = self.self_attn(x, rotation, runtime, wanted)
        residual = residual if wanted is None else residual[wanted]
        x, residual = self.post_attention_layernorm(x, residual, runtime)
        return self.mlp(x, runtime), residual


class DecoderLayer(AttentionAndMLP):
    """The same with its first norm: pre-norm attention and feed-forward."""

    def __init__(self, config: ModelConfig, layer: int, spec: DecoderSpec) -> None:
        super().__init__(config, layer, spec)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: torch.Tensor,
        runtime: LayerRuntime,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input is x + residual, both [T, hidden_size] (no residual: x)."""
        x, residual = self.input_layernorm(x, residual, runtime)
        return super().forward(x, residual, rotation, runtime, wanted)


class Decoder(nn.Module):
    """Token embedding, layers and last norm: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig, max_positions: int, spec: DecoderSpec) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.shard)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, spec) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture
    ) -> ModelOutput:
        """See `ModelOutput`. Of rows whose hidden states are not wanted, the last layer computes no
        more than K and V."""
        x, residual = self.embed_tokens(batch.input_ids, runtime), None
        rotation = runtime.rotation(self.rotary.table)
        tapped, last = capture.taps, len(self.layers) - 1
        taps = x.new_empty((x.shape[0], len(tapped), x.shape[1])) if tapped else None
        for index, layer in enumerate(self.layers):
            if taps is not None:
                _tap(x, residual, taps, [at for at, it in enumerate(tapped) if it == index])
            wanted = batch.read_index if index == last and not capture.all_rows else None
            x, residual = layer(x, residual, rotation, runtime, wanted)
        x, _ = self.norm(x, residual, runtime)
        return ModelOutput(x, None if taps is None else taps.flatten(1))


def _tap(
    x: torch.Tensor, residual: torch.Tensor | None, taps: torch.Tensor, places: list[int]
) -> None:
    """Stores x + residual [T, hidden_size] at `places` of taps [T, len(taps), hidden_size]."""
    for place in places:
        if residual is None:
            taps[:, place] = x
        else:
            torch.add(x, residual, out=taps[:, place])


class CausalLM(Model):
    """A decoder and its output head."""

    def __init__(self, config: ModelConfig, max_positions: int, spec: DecoderSpec) -> None:
        super().__init__()
        self.windows = spec.windows or (None,) * config.num_layers
        assert len(self.windows) == config.num_layers
        self.model = Decoder(config, max_positions, spec)
        self.lm_head = VocabLinear(config.hidden_size, config.vocab_size, config.shard)
        self._is_tied = config.tie_word_embeddings
        self._tie_head()
        tied = {HEAD: EMBEDDING} if self._is_tied else {}
        self.checkpoint_names = CheckpointNames(tied=tied, apart=apart_from(config))

    def shared_modules(self) -> SharedModules:
        return SharedModules(self.model.embed_tokens, self.lm_head)

    def untie(self) -> None:
        self._is_tied = False
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))

    def _tie_head(self) -> None:
        """Makes the head share the embedding's memory, if the checkpoint says so."""
        if self._is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def complete(self) -> None:
        self._tie_head()
        self.model.rotary.fill()  # in float32, whatever the type of the weights

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        output: ModelOutput = self.model(batch, runtime, capture)
        return output

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        return self.lm_head(hidden, runtime)


def apart_from(config: ModelConfig) -> tuple[str, ...]:
    """Returns the beginnings of the names of tensors that a checkpoint has for a drafter."""
    first, num_more = config.num_layers, config.integer("num_nextn_predict_layers", 0, 0) or 0
    numbered = (f"model.layers.{layer}." for layer in range(first, first + num_more))
    return (*NATIVE_NAMES, *numbered)
