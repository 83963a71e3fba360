"""A model on its device, with its weights, before it has KV memory."""

from __future__ import annotations

import torch

from sglang.srt.layers.layer_runtime import Collectives
from sglang.srt.mem_cache.kv_memory import KVGeometry
from sglang.srt.mem_cache.memory_pool import hand_back_unused
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.platform import memory_for
from sglang.srt.weight_sync.weight_store import WeightStore


class LoadedModel:
    """A model on its device, before it has KV memory.

    Attributes:
        weights: changes the model's weights, gives their memory back and takes it again.
        geometry: of the pool that the model needs.

    Raises:
        ModelPathError: if the weights cannot be loaded.
        ValueError: if the attention backend cannot be had; the text says why.
        MemoryError: if the device has too little memory for the weights.
    """

    def __init__(self, config: ExecutionConfig) -> None:
        dtype = getattr(torch, config.dtype)
        problems = config.capabilities.problems(config.device, dtype, config.page_size)
        if problems:
            raise ValueError(
                f"--attention-backend {config.attention_backend} cannot be used:"
                f" {'; '.join(problems)}."
            )
        config.capture.check(config.model.num_layers)
        with memory_for("the weights", "Use a GPU with more memory, or a smaller model."):
            self.model = load_model(
                config.model, config.load_format, config.row_width, dtype, config.device
            )
        hand_back_unused(torch.device(config.device))  # of rounding weights
        self.config = config
        self.weights = WeightStore(self.model, config.model)
        self.geometry = KVGeometry.of(config.model, dtype)

    def attach(self, target: LoadedModel, ranks: Collectives | None = None) -> None:
        """Gives a head the modules that it shares with the model that it drafts for; other models
        need none.

        Args:
            ranks: that hold that model together; None: this process holds it all.

        Raises:
            ModelPathError: if the head was trained for a target of other sizes.
        """
        if isinstance(self.model, DraftHead):
            self.model.attach(target.model, ranks)
            target.weights.after_update.append(self.model.refresh)
