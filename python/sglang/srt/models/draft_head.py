"""The common parts of heads that draft: layers over the hidden states of another model, the target,
whose embedding and output head they share, or have their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sglang.srt.head_config import EMBEDDING, OUTPUT_HEAD, DraftHeadConfig, check_fits
from sglang.srt.head_tensors import DRAFT_TO_TARGET, TARGET_TO_DRAFT
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import Collectives, LayerRuntime
from sglang.srt.layers.linear import Embedding, Linear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_config import ModelConfig
from sglang.srt.models import transformer
from sglang.srt.models.model import CheckpointNames, Model, SharedModules
from sglang.srt.models.transformer import AttentionAndMLP, DecoderLayer, DecoderSpec

HOT_HEAD = "hot_head.weight"
OF_TARGET = {  # its names of what a head may have too
    EMBEDDING: (transformer.EMBEDDING,),
    OUTPUT_HEAD: (transformer.HEAD, transformer.EMBEDDING),
}


class DraftHead(Model):
    """A head over a target. Before its first step it is given the target (`attach`).

    Where several ranks hold the target, each has all of the head, whose layers need no sums.

    Its forward pass reads `ForwardBatch.hidden`. `ModelOutput.hidden` is what the next draft step
    reads there, and what `compute_logits` makes logits of.

    Its tokens, the columns of its logits, are those of the target, or fewer: `to_target_ids`.

    Attributes:
        block_size: of a head that drafts a block of rows that see each other, how many there are,
            that of the certain token included; None: other heads.

    Args:
        first: its first layer.
    """

    reads_one_row = True  # the last that the target keeps
    block_size: int | None = None

    def __init__(self, config: ModelConfig, max_positions: int, first: AttentionAndMLP) -> None:
        super().__init__()
        self._config = config = head_config(config)
        self.windows = (None,) * config.num_layers
        self.draft_hidden_width = size = config.hidden_size
        upper = (
            DecoderLayer(config, layer, layer_spec(config)) for layer in range(1, config.num_layers)
        )
        self.layers = nn.ModuleList([first, *upper])
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)
        self._shared: SharedModules | None = None
        self._ranks: Collectives | None = None
        self.embed_tokens = Embedding(config.vocab_size, size) if config.own_embedding else None
        num_tokens = config.draft_vocab_size or config.vocab_size
        self.lm_head = Linear(size, num_tokens, bias=False) if config.own_output else None
        self.hot_head: Linear | None = None
        self.hot_ids: torch.Tensor  # [H] int64
        self.register_buffer("hot_ids", torch.empty(0), persistent=False)
        if config.hot_token_ids:
            self.hot_head = Linear(size, len(config.hot_token_ids), bias=False)
        self.d2t: torch.Tensor | None  # [draft_vocab_size] int64
        self.register_buffer(DRAFT_TO_TARGET, None)
        if config.draft_vocab_size is not None:
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            self.register_buffer(DRAFT_TO_TARGET, offsets)
        may_miss = {DRAFT_TO_TARGET} if config.draft_vocab_size == config.vocab_size else set()
        self.checkpoint_names = CheckpointNames(
            prefixes=(*config.names, *_upper_norms(config.num_layers)),
            only=config.only,
            ignored=frozenset({TARGET_TO_DRAFT}),
            zero_if_missing=frozenset(may_miss),
            computed=frozenset() if self.hot_head is None else frozenset({HOT_HEAD}),
            borrowed=OF_TARGET,
            lender=config.target,
        )

    def borrow(self, name: str) -> None:
        if name == EMBEDDING:
            self.embed_tokens = None
        else:
            self.lm_head = None
        names = self.checkpoint_names
        self.checkpoint_names = replace(names, ignored=names.ignored | {name})

    def complete(self) -> None:
        self.rotary.fill()
        self.hot_ids = torch.tensor(self._config.hot_token_ids, dtype=torch.int64)
        for name in self.checkpoint_names.zero_if_missing:
            self.state_dict(keep_vars=True)[name].zero_()
        if self.d2t is not None:
            self.d2t.zero_()  # without a file

    def problem_of(self, name: str, values: torch.Tensor) -> str | None:
        if name != DRAFT_TO_TARGET:
            return None
        ids = values.long() + torch.arange(len(values), device=values.device)
        wrong = torch.nonzero((ids < 0) | (ids >= self._config.vocab_size))
        if len(wrong):
            first = int(wrong[0])
            return (
                f"that makes token {int(ids[first])} of the target of draft token {first}, but"
                f" vocab_size is {self._config.vocab_size}"
            )
        tokens, counts = ids.unique(return_counts=True)
        if len(tokens) < len(ids):
            return f"that makes token {int(tokens[counts > 1][0])} of the target of several tokens"
        return None

    def attach(self, target: Model, ranks: Collectives | None = None) -> None:
        """Shares the target's embedding and output head, where it has none of its own: the modules,
        not copies.

        Args:
            ranks: that hold the target together; None: this process holds it all.

        Raises:
            ModelPathError: if the target has other sizes than the head was trained for.
        """
        self._shared, self._ranks = target.shared_modules(), ranks
        embed_tokens = self._shared.embed_tokens
        check_fits(self._config, embed_tokens.num_tokens, embed_tokens.embedding_dim)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies what it uses of the target's weights as rows: whenever those have changed."""
        if self.hot_head is not None:
            self._output.copy_rows(self.hot_ids, self.hot_head.weight, self._ranks)

    @property
    def _target(self) -> SharedModules:
        assert self._shared is not None, "A head without a target; see `attach`."
        return self._shared

    @property
    def _output(self) -> Linear:
        return self._target.lm_head if self.lm_head is None else self.lm_head

    def first_input(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns what the first layer reads, [T, its width], and the residual [T, hidden_size]
        (None: the same), of embedded tokens [T, hidden_size] and the hidden input [T, width]."""
        raise NotImplementedError

    def mask_input(self, runtime: LayerRuntime) -> torch.Tensor:
        """Returns the hidden input of a mask token, [1, hidden_size]."""
        raise NotImplementedError

    def carried(
        self, x: torch.Tensor, residual: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        """Returns `ModelOutput.hidden` of the last layer's output x + residual, [S, hidden_size]
        each."""
        raise NotImplementedError

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        assert not capture.layers, "A head has no layers to tap."
        hidden = hidden_of(batch, (self.hidden_width, self.draft_hidden_width))
        x, residual = self.first_input(self._embedded(batch, runtime), hidden, runtime)
        x, residual = self._through_layers(x, residual, batch, runtime, capture)
        return ModelOutput(self.carried(x, residual, runtime))

    def _embedded(self, batch: ForwardBatch, runtime: LayerRuntime) -> torch.Tensor:
        """Returns the embedding of each row's token, [T, hidden_size]."""
        embed = self._target.embed_tokens if self.embed_tokens is None else self.embed_tokens
        embedded: torch.Tensor = embed(batch.input_ids, runtime)
        return embedded

    def _through_layers(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        runtime: LayerRuntime,
        capture: HiddenCapture,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two tensors whose sum is the last layer's output, of the rows that are wanted; of
        what the first layer reads, and the residual (None: the same)."""
        rotation, last = runtime.rotation(self.rotary.table), len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            wanted = batch.read_index if index == last and not capture.all_rows else None
            x, residual = layer(x, residual, rotation, runtime, wanted)
        assert residual is not None  # there is a layer
        return x, residual

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        head = self._output if self.hot_head is None else self.hot_head
        return head(hidden, runtime)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of this head's tokens, int64 of any shape."""
        if self.d2t is not None:
            return ids + self.d2t[ids]
        return ids if self.hot_head is None else self.hot_ids[ids]

    def target_ids(self) -> torch.Tensor | None:
        """The target's id of each of this head's tokens, [H] int64; None if they are the same."""
        if self.d2t is not None:
            return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        return None if self.hot_head is None else self.hot_ids


def head_config(config: ModelConfig) -> DraftHeadConfig:
    """Returns the config of a head, which is what its class in `HEADS` is made with."""
    assert isinstance(config, DraftHeadConfig)
    return config


def layer_spec(config: DraftHeadConfig) -> DecoderSpec:
    """Returns the form of a head's layers."""
    return DecoderSpec(
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
    )


def _upper_norms(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Returns SGLang's names of the first norm of layers above the first one, each with ours."""
    upper = (f"layers.{layer}." for layer in range(1, num_layers))
    return tuple((f"{layer}hidden_norm.", f"{layer}input_layernorm.") for layer in upper)


def hidden_of(batch: ForwardBatch, widths: tuple[int, ...]) -> torch.Tensor:
    """The hidden input [T, width] of a step, of one of these widths."""
    assert batch.hidden is not None, "A head is fed hidden states beside tokens."
    assert batch.hidden.shape[1] in widths, f"{batch.hidden.shape[1]} wide, not {widths}."
    return batch.hidden
