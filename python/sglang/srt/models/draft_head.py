"""The common parts of heads that draft: one layer over the hidden states of another model, the
target, whose embedding they share, and maybe its output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.head_config import check_fits
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.model import CheckpointNames, Model
from sglang.srt.models.transformer import CausalLM, DecoderSpec

HOT_HEAD = "hot_head.weight"
LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class SharedModules:
    """Modules of the target. They are no submodules of the head, so their weights are the target's
    alone: updated, released and counted with it."""

    embed_tokens: nn.Embedding
    lm_head: Linear


class DraftHead(Model):
    """A head over a target. Before its first step it is given the target (`attach`).

    Its forward pass reads `ForwardBatch.hidden`. `ModelOutput.hidden` is what the next draft step
    reads there, and what `compute_logits` makes logits of.

    Its tokens, the columns of its logits, are those of the target, or fewer: `to_target_ids`.
    """

    reads_one_row = True  # the last that the target keeps

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.windows = (None,)
        self.draft_hidden_width = config.hidden_size
        self._config = config
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)
        self._shared: SharedModules | None = None
        self.hot_head: Linear | None = None
        self.hot_ids: torch.Tensor  # [H] int64
        self.register_buffer("hot_ids", torch.empty(0), persistent=False)
        if config.hot_token_ids:
            self.hot_head = Linear(config.hidden_size, len(config.hot_token_ids), bias=False)

    def names(self, zero_if_missing: frozenset[str]) -> CheckpointNames:
        """Returns the names in this head's checkpoints."""
        return CheckpointNames(
            prefixes=(("midlayer.", LAYER),),
            ignored=frozenset({"embed_tokens.weight", "t2d"}),
            zero_if_missing=zero_if_missing,
            computed=frozenset() if self.hot_head is None else frozenset({HOT_HEAD}),
        )

    def complete(self) -> None:
        self.rotary.fill()
        self.hot_ids = torch.tensor(self._config.hot_token_ids, dtype=torch.int64)
        for name in self.checkpoint_names.zero_if_missing:
            self.state_dict(keep_vars=True)[name].zero_()

    def attach(self, target: CausalLM) -> None:
        """Shares the target's embedding and output head: the modules, not copies.

        Raises:
            ModelPathError: if the target has other sizes than the head was trained for.
        """
        embed_tokens = target.model.embed_tokens
        check_fits(self._config, embed_tokens.num_embeddings, embed_tokens.embedding_dim)
        self._shared = SharedModules(embed_tokens, target.lm_head)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies what it uses of the target's weights as rows: whenever those have changed."""
        if self.hot_head is not None:
            weight = self._target.lm_head.weight
            torch.index_select(weight, 0, self.hot_ids, out=self.hot_head.weight)

    @property
    def _target(self) -> SharedModules:
        assert self._shared is not None, "A head without a target; see `attach`."
        return self._shared

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding of token_ids [T] int64: [T, hidden_size]."""
        embedded: torch.Tensor = self._target.embed_tokens(token_ids)
        return embedded

    def shared_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """Computes logits by the target's output head, of all tokens or of the hot ones, of hidden
        [S, hidden_size]."""
        head = self._target.lm_head if self.hot_head is None else self.hot_head
        return head(hidden, runtime)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of this head's tokens, int64 of any shape."""
        return ids if self.hot_head is None else self.hot_ids[ids]

    def target_ids(self) -> torch.Tensor | None:
        """The target's id of each of this head's tokens, [H] int64; None if they are the same."""
        return None if self.hot_head is None else self.hot_ids


def layer_spec(config: ModelConfig) -> DecoderSpec:
    """Returns the form of a head's one layer: Llama's."""
    bias = config.flag("attention_bias")
    return DecoderSpec(qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def hidden_of(batch: ForwardBatch, widths: tuple[int, ...]) -> torch.Tensor:
    """The hidden input [T, width] of a step, of one of these widths."""
    assert batch.hidden is not None, "A head is fed hidden states beside tokens."
    assert batch.hidden.shape[1] in widths, f"{batch.hidden.shape[1]} wide, not {widths}."
    return batch.hidden


def wanted_rows(batch: ForwardBatch, capture: HiddenCapture) -> torch.Tensor | None:
    """The rows [S] int64 whose output is wanted; None for all."""
    assert not capture.layers, "A head has no layers to tap."
    return None if capture.all_rows else batch.read_index
