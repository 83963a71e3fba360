"""The draft head of EAGLE-3 (arXiv 2503.01840, section 3) for Llama."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.head_config import Eagle3Config
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, hidden_of, layer_spec, wanted_rows
from sglang.srt.models.transformer import AttentionAndMLP, RMSNorm

D2T = "d2t"


class Eagle3Layer(AttentionAndMLP):
    """A layer whose attention reads a token's embedding beside the hidden state, each after a norm
    of its own. The hidden state alone is the residual."""

    def __init__(self, config: ModelConfig) -> None:
        size = config.hidden_size
        super().__init__(config, 0, layer_spec(config), input_size=2 * size)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)

    def fuse(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what attention reads [T, 2 * hidden_size], and the residual [T, hidden_size]."""
        x, _ = self.input_layernorm(embedded, None, runtime)
        normed, residual = self.hidden_norm(hidden, None, runtime)
        return torch.cat((x, normed), dim=-1), residual


class LlamaForCausalLMEagle3(DraftHead):
    """Reads each row's token beside the target's hidden states of the row before from several
    layers, or in draft steps its own output; gives that row's hidden state before the last norm
    (after it, if the config says `norm_output`)."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        self._entries = entries = Eagle3Config.of(config)
        size = config.hidden_size
        self.hidden_width = entries.num_taps * size
        self.fc = Linear(self.hidden_width, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head: Linear | None = None
        self.d2t: torch.Tensor | None  # [draft_vocab_size] int64
        self.register_buffer(D2T, None)
        if entries.draft_vocab_size is not None:
            self.lm_head = Linear(size, entries.draft_vocab_size, bias=False)
            offsets = torch.zeros(entries.draft_vocab_size, dtype=torch.int64)
            self.register_buffer(D2T, offsets)
        is_whole = entries.draft_vocab_size == config.vocab_size
        self.checkpoint_names = self.names(frozenset({D2T} if is_whole else ()))

    def complete(self) -> None:
        super().complete()
        if self.d2t is not None:
            self.d2t.zero_()

    def problem_of(self, name: str, values: torch.Tensor) -> str | None:
        if name != D2T:
            return None
        ids = values.long() + torch.arange(len(values), device=values.device)
        wrong = torch.nonzero((ids < 0) | (ids >= self._config.vocab_size))
        if not len(wrong):
            return None
        first = int(wrong[0])
        return (
            f"that makes token {int(ids[first])} of the target of draft token {first}, but"
            f" vocab_size is {self._config.vocab_size}"
        )

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        size = self._config.hidden_size
        hidden = hidden_of(batch, (self.hidden_width, size))
        if hidden.shape[1] != size:
            hidden = self.fc(hidden, runtime)
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        x, residual = layer.fuse(self.embed(batch.input_ids), hidden, runtime)
        rotation = runtime.rotation(self.rotary.table)
        x, residual = layer(x, residual, rotation, runtime, wanted_rows(batch, capture))
        normed, total = self.norm(x, residual, runtime)
        return ModelOutput(normed if self._entries.carries_normed else total)

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        if not self._entries.carries_normed:
            hidden, _ = self.norm(hidden, None, runtime)
        if self.lm_head is None:
            return self.shared_logits(hidden, runtime)
        return self.lm_head(hidden, runtime)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return super().to_target_ids(ids) if self.d2t is None else ids + self.d2t[ids]

    def target_ids(self) -> torch.Tensor | None:
        if self.d2t is None:
            return super().target_ids()
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
