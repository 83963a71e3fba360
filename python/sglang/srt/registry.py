"""Names to factories that are imported only when asked for."""

from __future__ import annotations

import importlib
from typing import Any


class Registry:
    """Maps names to `module:attribute`.

    Args:
        kind: what the names are, for the error text.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self._kind = kind
        self._entries = entries

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def load(self, name: str) -> Any:
        """Imports what `name` stands for.

        Raises:
            ValueError: for an unknown name; the message lists the known ones.
        """
        if name not in self._entries:
            raise ValueError(f"Unknown {self._kind} {name!r}; known: {', '.join(self.names)}.")
        module, attribute = self._entries[name].split(":")
        return getattr(importlib.import_module(module), attribute)


ACCEPTANCE = Registry(
    "acceptance of predictions",
    {
        "torch": "sglang.srt.mtp.acceptance:TorchAcceptance",
        "triton": "sglang.srt.mtp.triton_acceptance:TritonAcceptance",
    },
)
ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "flashinfer": "sglang.srt.layers.attention.flashinfer_backend:FlashInferBackend",
        "torch_native": "sglang.srt.layers.attention.torch_native_backend:TorchNativeBackend",
        "triton": "sglang.srt.layers.attention.triton_backend:TritonBackend",
    },
)
LAYER_OPS = Registry(
    "set of layer operations",
    {
        "torch": "sglang.srt.layers.ops.torch_ops:TorchOps",
        "triton": "sglang.srt.layers.ops.triton_ops:TritonOps",
    },
)
MODELS = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "sglang.srt.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "sglang.srt.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "sglang.srt.models.qwen3:Qwen3ForCausalLM",
    },
)
STEP_OPS = Registry(
    "set of step operations",
    {
        "torch": "sglang.srt.step.torch_step_ops:TorchStepOps",
        "triton": "sglang.srt.step.triton_step_ops:TritonStepOps",
    },
)
