"""The draft head of EAGLE-3 (arXiv 2503.01840, section 3) for Llama, and its later forms."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.head_config import DraftHeadConfig
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, head_config, layer_spec
from sglang.srt.models.transformer import AttentionAndMLP, RMSNorm


class Eagle3Layer(AttentionAndMLP):
    """A layer whose attention reads a token's embedding beside the hidden state, each after a norm
    of its own. The hidden state alone is the residual, before its norm or after it."""

    def __init__(self, config: DraftHeadConfig) -> None:
        size = config.hidden_size
        super().__init__(config, 0, layer_spec(config), input_size=2 * size)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.adds_normed = config.norm_before_residual

    def fuse(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what attention reads [T, 2 * hidden_size], and the residual [T, hidden_size]."""
        x, _ = self.input_layernorm(embedded, None, runtime)
        normed, whole = self.hidden_norm(hidden, None, runtime)
        return torch.cat((x, normed), dim=-1), normed if self.adds_normed else whole


class LlamaForCausalLMEagle3(DraftHead):
    """Reads each row's token beside the target's hidden states of the row before from several
    layers, or in draft steps its own output; gives that row's hidden state before the last norm
    (after it, if the config says `norm_output`)."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        head = head_config(config)
        assert head.taps is not None
        super().__init__(config, max_positions, Eagle3Layer(head))
        size, eps, count = head.hidden_size, head.rms_norm_eps, len(head.taps.layers)
        self.hidden_width = count * head.target_hidden_size
        self.fc = Linear(self.hidden_width, size, bias=head.fc_bias)
        self.input_norm = RMSNorm(self.hidden_width, eps) if head.norm_before_fc else None
        norms = range(count if head.fc_norm else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(head.target_hidden_size, eps) for _ in norms)
        self.norm = RMSNorm(size, eps)
        self._carries_normed = head.carries_normed
        self.mask_hidden: nn.Parameter | None = None
        if head.mask is not None:
            self.mask_token_id = head.mask.token_id
            shape = (1,) * (head.mask.num_dims - 1) + (self.hidden_width,)
            self.mask_hidden = nn.Parameter(torch.empty(shape), requires_grad=False)

    def first_input(
        self, embedded: torch.Tensor, hidden: torch.Tensor, runtime: LayerRuntime
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.shape[1] == self.hidden_width:
            hidden = self._joined(hidden, runtime)
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer.fuse(embedded, hidden, runtime)

    def mask_input(self, runtime: LayerRuntime) -> torch.Tensor:
        assert self.mask_hidden is not None, "A head without mask tokens."
        return self._joined(self.mask_hidden.view(1, -1), runtime)

    def _joined(self, taps: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """Returns [T, hidden_size] of `taps` [T, hidden_width]."""
        joined: torch.Tensor = self.fc(self._normed_taps(taps, runtime), runtime)
        return joined

    def _normed_taps(self, taps: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """Returns `taps` [T, hidden_width] after the norms before `fc`, if there are any."""
        if self.input_norm is not None:
            taps, _ = self.input_norm(taps, None, runtime)
        if not self.fc_norm:
            return taps
        each = taps.chunk(len(self.fc_norm), dim=1)
        normed = (norm(tap.contiguous(), None, runtime)[0] for norm, tap in zip(self.fc_norm, each))
        return torch.cat([*normed], dim=1)

    def carried(
        self, x: torch.Tensor, residual: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        normed, whole = self.norm(x, residual, runtime)
        carried: torch.Tensor = normed if self._carries_normed else whole
        return carried

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        if not self._carries_normed:
            hidden, _ = self.norm(hidden, None, runtime)
        return super().compute_logits(hidden, runtime)
