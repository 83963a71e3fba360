"""Tables of the layouts in which draft heads are published: classes, entries, names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
MASK_HIDDEN = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of one entry
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Objects of config.json whose entries belong to the head as those at its top do.
SPECULATORS, INNER, OPTIONS = "speculators_model_type", "transformer_layer_config", "eagle_config"


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes a form of config.json.

    Attributes:
        maker: who writes it, for people.
        kind: EAGLE or EAGLE3; None: --speculative-algorithm says which.
        problem: says why no drafter here takes it; empty if one does.
        qkv_bias: the projections to queries, keys and values have biases, whatever entries say.
        has_masks: drafts all tokens but the first in one pass, from mask tokens (P-EAGLE).
    """

    maker: str
    kind: str | None = None
    problem: str = ""
    qkv_bias: bool = False
    has_masks: bool = False


def _without_drafter(maker: str, drafts: str) -> Layout:
    return Layout(maker, problem=f"it is a head of {maker}, which {drafts}; no drafter here can")


P_EAGLE = Layout("P-EAGLE", EAGLE3, has_masks=True)
DFLASH = _without_drafter("DFlash", "drafts a block of tokens in one pass from mask states")
DSPARK = _without_drafter("DSpark", "drafts a block and corrects it by a Markov head")
NEXTN = _without_drafter("NEXTN", "is the model's own layer for multi-token prediction (MTP)")

# By the first entry of `architectures`.
ARCHITECTURES = {
    "LlamaForCausalLM": Layout("EAGLE"),
    "Qwen2ForCausalLM": Layout("EAGLE", qkv_bias=True),
    EAGLE: Layout("SGLang", EAGLE),
    "EagleLlamaForCausalLM": Layout("vLLM", EAGLE),
    EAGLE3: Layout("SpecForge", EAGLE3),
    "Eagle3LlamaForCausalLM": Layout("vLLM", EAGLE3),
    "DFlashDraftModel": DFLASH,
    "Qwen3DSparkModel": DSPARK,
}
NAMED_LIKE_MODELS = [ARCHITECTURES[name] for name in ("LlamaForCausalLM", "Qwen2ForCausalLM")]
HEAD_ENTRIES = (SPECULATORS, "draft_vocab_size", "dflash_config")  # which no model has
# By `speculators_model_type`.
SPECULATORS_TYPES = {
    "eagle3": Layout("speculators", EAGLE3),
    "peagle": Layout("speculators", EAGLE3, has_masks=True),
    "dflash": DFLASH,
    "dflash2": DFLASH,
    "dspark": DSPARK,
    "mtp": NEXTN,
}
# Entries and tensors that say more than a class does; the first one that is there counts.
MARKS = {
    "dspark_target_layer_ids": DSPARK,
    "markov_head.markov_w1.weight": DSPARK,
    "dflash_config": DFLASH,
    **dict.fromkeys((*MASK_TOKENS, MASK_HIDDEN), P_EAGLE),
    "mtp.fc.weight": NEXTN,
}
MTP_NAMES = ("MTP", "NextN")  # in names of classes
# Beginnings of a tensor's name, each with what the head calls it; by kind, one after the other.
RENAMED = {
    EAGLE: (("model.", ""),),
    EAGLE3: (
        ("model.", ""),
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ),
}
# Entries that are read; others are named in the start-up summary.
USED_ENTRIES = frozenset(
    "architectures attention_bias bias draft_vocab_size fc_norm head_dim hidden_act hidden_size"
    f" intermediate_size layer_types {LAYER_IDS} max_position_embeddings mlp_bias model_type"
    " norm_before_fc norm_before_residual norm_output num_attention_heads num_aux_hidden_states"
    " num_hidden_layers num_key_value_heads original_max_position_embeddings quantization_config"
    f" rms_norm_eps rope_parameters rope_scaling rope_theta {SPECULATORS} target_hidden_size"
    " use_aux_hidden_state use_aux_norm use_sliding_window vocab_size".split()
).union(MASK_TOKENS)


def layout_of(entries: Mapping[str, Any], tensors: Mapping[str, Any]) -> Layout | None:
    """Returns the layout of a head; None for one that is not known.

    Args:
        entries: of config.json.
        tensors: by name; empty where there is no file yet.
    """
    if entries.get(SPECULATORS) is not None:
        return SPECULATORS_TYPES.get(str(entries[SPECULATORS]))
    for name, layout in MARKS.items():
        if entries.get(name) is not None or name in tensors:
            return layout
    name = architecture_of(entries)
    return NEXTN if any(mark in name for mark in MTP_NAMES) else ARCHITECTURES.get(name)


def head_mark(entries: Mapping[str, Any]) -> str:
    """Says by which entry of config.json a folder is that of a head, no model's; empty if none
    says so."""
    name = architecture_of(entries)
    if name in ARCHITECTURES and ARCHITECTURES[name] not in NAMED_LIKE_MODELS:
        return f"architecture {name!r}"
    return next((mark for mark in HEAD_ENTRIES if entries.get(mark) is not None), "")


def architecture_of(entries: Mapping[str, Any]) -> str:
    """Returns the name of a head's class; empty if the entries give none."""
    names = entries.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """Returns a tensor's name with each prefix, in turn, replaced by what belongs there."""
    for prefix, own in prefixes:
        if name.startswith(prefix):
            name = own + name.removeprefix(prefix)
    return name
