"""Tables of the layouts in which draft heads are published: classes, entries, names of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
NEXTN = "LlamaForCausalLMNextN"  # a layer of the model itself for multi-token prediction
DFLASH = "DFlashDraftModel"  # drafts a block of tokens in one pass
MASK_HIDDEN = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of one entry
MASK_DEPTHS = ("num_depths", "para_num")  # how many tokens a head of P-EAGLE was trained to draft
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Objects of config.json whose entries belong to the head as those at its top do.
SPECULATORS, INNER, OPTIONS = "speculators_model_type", "transformer_layer_config", "eagle_config"
BLOCK_OPTIONS = "dflash_config"
OBJECTS = (INNER, OPTIONS, BLOCK_OPTIONS)
# Ids of layers of DFlash: in BLOCK_OPTIONS, and at the top.
BLOCK_OUTPUTS, BLOCK_INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"
NUM_LAYERS = "num_target_layers"


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes a form of config.json.

    Attributes:
        maker: who writes it, for people.
        kind: EAGLE, EAGLE3, NEXTN or DFLASH; None: --speculative-algorithm says which.
        problem: says why no drafter here takes it; empty if one does.
        qkv_bias: the projections to queries, keys and values have biases, whatever entries say.
        hidden_first: the projection of NEXTN reads the hidden state before the embedding.
        has_masks: drafts all tokens but the first in one pass, from mask tokens (P-EAGLE), or a
            block of them (DFlash).
    """

    maker: str
    kind: str | None = None
    problem: str = ""
    qkv_bias: bool = False
    hidden_first: bool = False
    has_masks: bool = False


def _without_drafter(maker: str, drafts: str) -> Layout:
    return Layout(maker, problem=f"it is a head of {maker}, which {drafts}; no drafter here can")


P_EAGLE = Layout("P-EAGLE", EAGLE3, has_masks=True)
Z_LAB = Layout("z-lab", DFLASH, has_masks=True)
DFLASH2 = _without_drafter("DFlash2", "adds convolutions to DFlash and selects among candidates")
DSPARK = _without_drafter("DSpark", "drafts a block and corrects it by a Markov head")
NATIVE = Layout("NEXTN", NEXTN)

# By the first entry of `architectures`.
ARCHITECTURES = {
    "LlamaForCausalLM": Layout("EAGLE"),
    "Qwen2ForCausalLM": Layout("EAGLE", qkv_bias=True),
    EAGLE: Layout("SGLang", EAGLE),
    "EagleLlamaForCausalLM": Layout("vLLM", EAGLE),
    EAGLE3: Layout("SpecForge", EAGLE3),
    NEXTN: NATIVE,
    "Eagle3LlamaForCausalLM": Layout("vLLM", EAGLE3),
    DFLASH: Z_LAB,
    "Qwen3DSparkModel": DSPARK,
}
NAMED_LIKE_MODELS = [ARCHITECTURES[name] for name in ("LlamaForCausalLM", "Qwen2ForCausalLM")]
HEAD_ENTRIES = (SPECULATORS, "draft_vocab_size", BLOCK_OPTIONS)  # which no model has
# By `speculators_model_type`.
SPECULATORS_TYPES = {
    "eagle3": Layout("speculators", EAGLE3),
    "peagle": Layout("speculators", EAGLE3, has_masks=True),
    "dflash": Layout("speculators", DFLASH, has_masks=True),
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "mtp": Layout("speculators", NEXTN),
}
# Parts of names of tensors that no other head has.
PARTS = {"markov_head.": DSPARK, "candidate_selector.": DFLASH2, "attention_conv": DFLASH2}
# Entries and tensors that say more than a class does; the first one that is there counts.
MARKS = {
    "dspark_target_layer_ids": DSPARK,
    BLOCK_OPTIONS: Z_LAB,
    "block_size": Z_LAB,
    **dict.fromkeys((*MASK_TOKENS, MASK_HIDDEN), P_EAGLE),
    "mtp.fc.weight": Layout("Qwen3-Next", NEXTN),
    "model.mtp_layers.0.input_proj.weight": Layout("MiMo", NEXTN, hidden_first=True),
}
MTP_NAMES = ("MTP", "NextN")  # in names of classes
# Beginnings of a tensor's name, each with what the head calls it; by kind, one after the other.
RENAMED = {
    EAGLE: (("model.", ""),),
    DFLASH: (("model.", ""),),
    EAGLE3: (
        ("model.", ""),
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ),
    NEXTN: (
        ("model.mtp_layers.", "layers."),
        ("mtp_layers.", "layers."),
        ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
        ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
        ("mtp.", ""),
        ("layers.0.token_layernorm.", "embedding_norm."),
        ("layers.0.hidden_layernorm.", "hidden_norm."),
        ("layers.0.input_proj.", "fc."),
        ("layers.0.final_layernorm.", "norm."),
        ("layers.0.enorm.", "embedding_norm."),
        ("layers.0.hnorm.", "hidden_norm."),
        ("layers.0.eh_proj.", "fc."),
        ("layers.0.shared_head.norm.", "norm."),
        ("layers.0.shared_head.head.", "lm_head."),
        ("layers.0.embed_tokens.", "embed_tokens."),
    ),
}
# Beginnings of tensors of NEXTN in a model's own files; DeepSeek and GLM number them on, see below.
NATIVE_NAMES = ("mtp.", "model.mtp_layers.")
NUMBERED_ON = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
# Parts of the names of a layer's tensors, and what no layer here has.
MISSING = {
    ".experts.": "a mixture of experts",
    ".kv_a_proj": "latent attention (MLA)",
    ".linear_attn.": "linear attention",
}
# Entries that are read; others are named in the start-up summary.
USED_ENTRIES = frozenset(
    "architectures attention_bias bias draft_vocab_size fc_norm head_dim hidden_act hidden_size"
    f" intermediate_size layer_types {LAYER_IDS} max_position_embeddings mlp_bias model_type"
    " norm_before_fc norm_before_residual norm_output num_attention_heads num_aux_hidden_states"
    " num_hidden_layers num_key_value_heads original_max_position_embeddings quantization_config"
    f" rms_norm_eps rope_parameters rope_scaling rope_theta {SPECULATORS} target_hidden_size"
    " use_aux_hidden_state use_aux_norm use_sliding_window vocab_size".split()
).union(MASK_TOKENS, MASK_DEPTHS)
USED_OF_BLOCKS = {BLOCK_INPUTS, BLOCK_OUTPUTS, "block_size", NUM_LAYERS, "sample_from_anchor"}


def layout_of(entries: Mapping[str, Any], tensors: Mapping[str, Any]) -> Layout | None:
    """Returns the layout of a head; None for one that is not known.

    Args:
        entries: of config.json.
        tensors: by name; empty where there is no file yet.
    """
    if entries.get(SPECULATORS) is not None:
        return SPECULATORS_TYPES.get(str(entries[SPECULATORS]))
    for part, layout in PARTS.items():
        if any(part in name for name in tensors):
            return layout
    for name, layout in MARKS.items():
        if entries.get(name) is not None or name in tensors:
            return layout
    if numbered_on(tensors):
        return Layout("DeepSeek", NEXTN)
    name = architecture_of(entries)
    return NATIVE if any(mark in name for mark in MTP_NAMES) else ARCHITECTURES.get(name)


def used_entries(kind: str) -> frozenset[str]:
    """Returns the entries that are read of a head of this kind."""
    return USED_ENTRIES | USED_OF_BLOCKS if kind == DFLASH else USED_ENTRIES


def numbered_on(names: Iterable[str]) -> tuple[int, ...]:
    """Returns the numbers of layers for multi-token prediction that follow a model's own layers, as
    DeepSeek and GLM have them."""
    return tuple(sorted(int(found[1]) for name in names if (found := NUMBERED_ON.fullmatch(name))))


def names_of(kind: str, tensors: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Returns beginnings of a tensor's name, each with what a head of this kind calls it."""
    numbers = numbered_on(tensors) if kind == NEXTN else ()
    numbered = ((f"model.layers.{it}.", f"layers.{at}.") for at, it in enumerate(numbers))
    return (*numbered, *RENAMED[kind])


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
