"""Tables of model families: what is served, by which code, and why the rest is not; no torch.

The loader and `sglang check-model` go by them alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sglang.srt.head_layouts import architecture_of
from sglang.srt.registry import HEADS, MODELS, OWN, TRANSFORMERS
from sglang.srt.weight_format import QUANTIZATION, parse_format

EXPERTS, LATENT, RECURRENT = (
    "a mixture of experts",
    "latent attention (MLA)",
    "layers with a recurrent state in place of K and V",
)
# Classes with experts that a file of ours computes.
WITH_EXPERTS = frozenset({"MixtralForCausalLM", "Qwen3MoeForCausalLM"})
NEEDED = "a dense checkpoint whose layers all keep K and V, of heads of one size"


class Feature(NamedTuple):
    """Something that no code here computes, and how a config.json says that a model has it.

    Attributes:
        name: for people.
        entries: matches the names of entries that only such models have, with a value.
        layer_types: of layers that have it.
    """

    name: str
    entries: re.Pattern[str]
    layer_types: frozenset[str] = frozenset()


FEATURES = (
    Feature(
        RECURRENT,
        re.compile(
            r"(n_)?mamba_\w+|ssm_\w+|linear_num_(key_)?heads|linear_conv_kernel_dim|lru_width"
            r"|state_size|conv_L_cache|attention_hidden_size|chunkwise_kernel"
        ),
        frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "gated_delta_net"}),
    ),
    Feature(LATENT, re.compile(r"kv_lora_rank")),
    Feature(EXPERTS, re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts")),
    Feature("layers that share K and V", re.compile(r"num_kv_shared_layers")),
    Feature("layers with other sizes of heads", re.compile(r"global_head_dim|per_layer_config")),
)
LAYER_TYPES = ("layer_types", "layers_block_type", "block_types")  # names of one entry
PARTS = ("text_config", "ffn_config")  # objects in config.json with entries of a decoder
# Dense decoders that transformers' code computes here; each is tested. Others are asked for.
BY_TRANSFORMERS = frozenset(
    {
        "Cohere2ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "MinistralForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "Phi3ForCausalLM",
        "SmolLM3ForCausalLM",
    }
)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
MAX_SIZE = 1 << 24  # more than any model has of anything
# Names of methods in quantization_config, for people.
QUANTIZED = {
    "awq": "AWQ (weights of 4 bits)",
    "gptq": "GPTQ (weights of 4 bits)",
    "fp8": "fp8 of another form than e4m3 with a scale for each tensor, output or block",
    "compressed-tensors": "compressed-tensors of another form than fp8 with a scale for each"
    " tensor, output or block",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4 (weights of 4 bits)",
    "modelopt": "ModelOpt",
}
CONVERTIBLE = ("awq", "gptq")  # to plain weights
ORIGINAL = "the checkpoint in bfloat16, float16 or float32"
CONVERT = "sglang convert-checkpoint SOURCE TARGET makes one of this folder"


def why_not_computed(entries: Mapping[str, Any], impl: str = OWN) -> str | None:
    """Says what in a config.json no code here computes, with the remedy; None if there is nothing.

    What a model has comes before the form of its weights, which could be converted.

    Args:
        impl: `own` or `transformers`, what is to compute it.
    """
    parts = _parts(entries)
    found = {name: mark for part in parts for name, mark in _features(part)}
    if impl == OWN and architecture_of(entries) in WITH_EXPERTS:
        found.pop(EXPERTS, None)
    if found:
        said = " and ".join(f"{mark} says {name}" for name, mark in found.items())
        which = "which is" if len(found) == 1 else "which are"
        return f"{said}, {which} not supported; use {NEEDED}"
    if any(part.get("is_encoder_decoder") is True for part in parts):
        return "is_encoder_decoder says an encoder and a decoder; use a model with a decoder alone"
    for part in parts:
        for name in QUANTIZATION:
            if part.get(name) and parse_format(part[name]) is None:
                method, said = _method(part[name])
                remedy = f"{ORIGINAL} ({CONVERT})" if method in CONVERTIBLE else ORIGINAL
                return f"{name} says {said}, which is not supported; use {remedy}"
    return None


def impl_of(entries: Mapping[str, Any]) -> str:
    """Chooses what computes a model: a file of ours where there is one. Where no architecture is
    named, the file's reader says so."""
    named = architecture_of(entries)
    return TRANSFORMERS if named and named not in {*MODELS.names, *HEADS.names} else OWN


def why_not_known(entries: Mapping[str, Any], impl: str) -> str | None:
    """Says why there is no code for what config.json calls the model; None if there may be.

    Args:
        impl: `own` or `transformers`, what is to compute it.
    """
    names = entries.get("architectures")
    if names and not (isinstance(names, list) and isinstance(names[0], str)):
        return f"architectures must be a list with the name of a class, not {names!r:.40}"
    if impl == TRANSFORMERS or impl_of(entries) == OWN:
        return None
    return (
        f"architecture {architecture_of(entries)!r:.80} is not supported; use a checkpoint of one"
        f" that is known: {', '.join(MODELS.names)}"
    )


def why_no_sizes(entries: Mapping[str, Any]) -> str | None:
    """Says which size of a config.json no model can have; None if all may be."""
    for name in SIZES:
        value = entries.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= MAX_SIZE):
            return f"{name} is {value!r:.40}, but must be at least 1 and at most {MAX_SIZE}"
    return None


def _parts(entries: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Gives the entries, and those of objects in them that describe the decoder too."""
    inner = (entries.get(name) for name in PARTS)
    return [entries, *(each for each in inner if isinstance(each, dict))]


def _features(entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Gives the name of each feature of a model, and the first entry that says it."""
    types = {
        each
        for entry in LAYER_TYPES
        if isinstance(listed := entries.get(entry), list)
        for each in listed
        if isinstance(each, str)
    }
    for feature in FEATURES:
        marks = (
            name
            for name, value in entries.items()
            if feature.entries.fullmatch(name) and value and value is not True and value != 1
        )
        mark = next(marks, None)
        if mark is not None:
            yield feature.name, mark
        elif types & feature.layer_types:
            yield feature.name, f"layer type {min(types & feature.layer_types)!r}"


def _method(config: Any) -> tuple[str, str]:
    """Names the method of quantized weights, as it is written and for people."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method is None:
        return "", "quantized weights"
    return str(method), QUANTIZED.get(str(method), f"{method!r:.40}") + ", quantized weights"
