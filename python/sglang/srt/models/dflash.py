"""The draft head of DFlash (arXiv 2602.06036): a few layers draft a block of tokens in one pass."""

from __future__ import annotations

from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.draft_head import DraftHead, head_config, hidden_of, layer_spec
from sglang.srt.models.transformer import DecoderLayer, RMSNorm


class DFlashDraftModel(DraftHead):
    """Reads the target's hidden states of several layers, and later blocks of tokens.

    Of a row with hidden states it only stores K and V, in each layer those of the same joined
    hidden state. Rows without are those of blocks, which go through all layers, and it gives their
    hidden states after the last norm."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        head = head_config(config)
        assert head.taps is not None
        assert head.mask is not None
        super().__init__(config, max_positions, DecoderLayer(head, 0, layer_spec(head)))
        self.hidden_width = len(head.taps.layers) * head.target_hidden_size
        self.draft_hidden_width = 0
        self.mask_token_id, self.block_size = head.mask.token_id, head.mask.block_size
        self.fc = Linear(self.hidden_width, head.hidden_size, bias=head.fc_bias)
        self.hidden_norm = RMSNorm(head.hidden_size, head.rms_norm_eps)
        self.norm = RMSNorm(head.hidden_size, head.rms_norm_eps)

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        assert not capture.layers, "A head has no layers to tap."
        if batch.hidden is not None:
            return self._store(batch, runtime)
        embedded = self._embedded(batch, runtime)
        x, residual = self._through_layers(embedded, None, batch, runtime, capture)
        return ModelOutput(self.norm(x, residual, runtime)[0])

    def _store(self, batch: ForwardBatch, runtime: LayerRuntime) -> ModelOutput:
        """Stores K and V of the target's hidden states; gives what they are made of."""
        taps = hidden_of(batch, (self.hidden_width,))
        x, _ = self.hidden_norm(self.fc(taps, runtime), None, runtime)
        rotation = runtime.rotation(self.rotary.table)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.store(x, rotation, runtime)
        return ModelOutput(x if batch.read_index is None else x[batch.read_index])
