"""Names of classes that are imported only when asked for, and what goes by them. Importing this
module loads no other."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any


def load(place: str) -> Any:
    """Imports what `module:attribute` names."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


class Registry:
    """Maps names to `module:attribute`.

    Args:
        kind: what the names are, for the error text.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self._kind = kind
        self.entries = entries

    @property
    def names(self) -> list[str]:
        return sorted(self.entries)

    def load(self, name: str) -> Any:
        """Imports what `name` stands for.

        Raises:
            ValueError: for an unknown name; the message lists the known ones.
        """
        if name not in self.entries:
            raise ValueError(f"Unknown {self._kind} {name!r}; known: {', '.join(self.names)}.")
        return load(self.entries[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """One implementation of all that a step computes beside attention: `module:attribute` of a
    class or a function for each contract, for `load`.

    Attributes:
        layers: what makes `LayerOps` (layers/layer_runtime.py).
        step: of `StepOps` (step/step_ops.py).
        masks: of `MaskOps` (speculative/mask_ops.py).
        ngrams: of `NgramOps` (speculative/ngram_ops.py).
        trees: what makes a `TreeSearch` (model_executor/draft_tree_passes.py).
        paths: a function, `FindPathRows` (speculative/kept_paths.py).
        ahead: `CompilesAhead` (model_executor/runner_group.py); empty: they are not compiled.
        compares_first: the first call of `layers` for a shape finds out which kernels may compute
            later ones, so steps run once before they are captured.
    """

    layers: str
    step: str
    masks: str
    ngrams: str
    trees: str
    paths: str
    ahead: str = ""
    compares_first: bool = False


# Attention and operations of --enable-deterministic-inference and, in steps with requests that ask
# for it, of --enable-deterministic-requests.
ROW_INDEPENDENT = "row_independent"
ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "flashinfer": "sglang.srt.layers.attention.flashinfer_backend:FlashInferBackend",
        ROW_INDEPENDENT: (
            "sglang.srt.layers.attention.row_independent_backend:RowIndependentBackend"
        ),
        "torch_native": "sglang.srt.layers.attention.torch_native_backend:TorchNativeBackend",
        "triton": "sglang.srt.layers.attention.triton_backend:TritonBackend",
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLimits:
    """Holds what is known of an attention backend before it is loaded.

    Attributes:
        dtypes: names in torch.
        max_mask_entries: see `AttentionCapabilities`.
        package: Python package that it imports; empty for none.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    max_mask_entries: int | None = None
    package: str = ""


_ALL_DTYPES = frozenset({"float32", "bfloat16", "float16"})
# Flags are checked by these before anything starts. A backend that is not here is asked when it is
# loaded.
ATTENTION_LIMITS = {
    "flashinfer": AttentionLimits(
        devices=frozenset({"cuda"}),
        dtypes=_ALL_DTYPES - {"float32"},
        max_mask_entries=1 << 29,  # of a byte each; FlashInfer counts them in 32 bits
        package="flashinfer",
    ),
    "torch_native": AttentionLimits(devices=frozenset({"cpu", "cuda"}), dtypes=_ALL_DTYPES),
    "triton": AttentionLimits(devices=frozenset({"cuda"}), dtypes=_ALL_DTYPES),
}
DEFAULT_ATTENTION_BACKENDS = {"cpu": "torch_native", "cuda": "triton"}  # by device
OPERATIONS = {
    "torch": Operations(
        layers="sglang.srt.layers.ops.torch_ops:TorchOps",
        step="sglang.srt.step.torch_step_ops:TorchStepOps",
        masks="sglang.srt.speculative.mask_ops:TorchMaskOps",
        ngrams="sglang.srt.speculative.ngram_ops:TorchNgramOps",
        trees="sglang.srt.model_executor.draft_tree_passes:TorchTreeSearch",
        paths="sglang.srt.speculative.kept_paths:torch_path_rows",
    ),
    "triton": Operations(
        layers="sglang.srt.layers.ops.triton_ops:TritonOps",
        step="sglang.srt.step.triton_step_ops:TritonStepOps",
        masks="sglang.srt.speculative.triton_mask_ops:TritonMaskOps",
        ngrams="sglang.srt.speculative.triton_ngram_ops:TritonNgramOps",
        trees="sglang.srt.model_executor.triton_tree_search:triton_tree_search",
        paths="sglang.srt.speculative.triton_kept_paths:triton_path_rows",
        ahead="sglang.srt.layers.triton_ahead:KernelsAhead",
    ),
}
OPERATIONS[ROW_INDEPENDENT] = replace(
    OPERATIONS["triton"],
    layers="sglang.srt.layers.ops.triton_ops:row_independent_ops",
    compares_first=True,
)
DEFAULT_OPERATIONS = {"cpu": "torch", "cuda": "triton"}  # by device
DRAFTERS = Registry(
    "drafter",
    {
        "dflash": "sglang.srt.speculative.dflash_worker:DFlashDrafter",
        "eagle": "sglang.srt.speculative.eagle_worker:EagleDrafter",
        "mtp": "sglang.srt.speculative.mask_drafter:MaskDrafter",
        "ngram": "sglang.srt.speculative.ngram_worker:NgramDrafter",
        "pair": "sglang.srt.speculative.pair_worker:PairDrafter",
        "standalone": "sglang.srt.speculative.standalone_worker:StandaloneDrafter",
    },
)
LENGTH_POLICIES = Registry(
    "length policy",
    {
        "adaptive": "sglang.srt.lookahead.ema:AdaptiveController",
        "fixed": "sglang.srt.lookahead.length_policy:FixedLength",
        "load_aware": "sglang.srt.lookahead.load_aware_drafts:LoadAwareDrafts",
        "load_aware_masks": "sglang.srt.lookahead.load_aware_masks:LoadAwareMasks",
        "matched": "sglang.srt.lookahead.matched_drafts:MatchedDrafts",
    },
)
MODELS = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "sglang.srt.models.llama:LlamaForCausalLM",
        "MiMoForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
        "MixtralForCausalLM": "sglang.srt.models.mixtral:MixtralForCausalLM",
        "MistralForCausalLM": "sglang.srt.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "sglang.srt.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "sglang.srt.models.qwen3_moe:Qwen3MoeForCausalLM",
    },
)
# The model of any other decoder, by transformers' own modelling code.
TRANSFORMERS_MODEL = "sglang.srt.models.transformers_model:TransformersModel"
OWN, TRANSFORMERS = "own", "transformers"  # values of --model-impl, beside `auto`
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# What transformers takes for entries that a config.json lacks, by its `model_type`. Sizes have none
# here: a config.json without them is not this model's.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
    },
    "mimo": {"architectures": ["MiMoForCausalLM"], **_QWEN},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_QWEN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, **_QWEN},
    "qwen3_moe": {**_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4},
}
HEADS = Registry(
    "head over a target model",
    {
        "DFlashDraftModel": "sglang.srt.models.dflash:DFlashDraftModel",
        "LlamaForCausalLMEagle": "sglang.srt.models.llama_eagle:LlamaForCausalLMEagle",
        "LlamaForCausalLMEagle3": "sglang.srt.models.llama_eagle3:LlamaForCausalLMEagle3",
        "LlamaForCausalLMNextN": "sglang.srt.models.llama_nextn:LlamaForCausalLMNextN",
    },
)
