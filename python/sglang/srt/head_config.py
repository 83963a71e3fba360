"""Reads the folder of a draft head: EAGLE, EAGLE-3, NEXTN or DFlash, layers over a target; no
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.head_checks import check_fits, head_problem, layout_problem, refuse
from sglang.srt.head_layouts import (
    DFLASH,
    LAYER_IDS,
    MASK_HIDDEN,
    NATIVE,
    NEXTN,
    OBJECTS,
    Layout,
    layer_numbers,
    layout_of,
    names_of,
    only_names,
    renamed,
    used_entries,
)
from sglang.srt.head_masks import MaskInput, read_mask_input
from sglang.srt.head_taps import IDS, Taps, read_taps
from sglang.srt.head_tensors import read_shapes, vocabulary_problem
from sglang.srt.model_config import (
    ModelConfig,
    parse_model_config,
    read_entries,
    resolve_model_path,
)
from sglang.srt.token_map import read_token_map

EMBEDDING, OUTPUT_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"
SELF = "layers.0.self_attn."


@dataclass(frozen=True, kw_only=True)
class DraftHeadConfig(ModelConfig):
    """Describes a head, however its folder is laid out: the shape of its layers, and the rest.

    `architecture` is EAGLE, EAGLE3, NEXTN or DFLASH. `num_layers` follows from the tensors, if
    there are.

    Attributes:
        layout: the form of its config.json.
        target: folder of the model that it drafts for.
        target_hidden_size: of that model's hidden states.
        taps: of EAGLE-3 and DFlash, which of them it reads; others read the last, normalized ones.
        names: beginnings of tensors' names in its files, each with the head's.
        only: see `CheckpointNames`; empty for a head with files of its own.
        draft_vocab_size: tokens of its own; None if they are the target's.
        own_embedding, own_output: it has an embedding, an output head.
        qkv_bias, output_bias, mlp_bias, qk_norm: see `DecoderSpec`.
        fc_bias: `fc`, which joins what it reads, has a bias, or must have.
        fc_norm: a norm for each tap, before `fc`.
        norm_before_fc: one norm for all taps, before `fc`.
        norm_before_residual: the first layer's residual is the hidden state after its norm.
        carries_normed: the next draft step reads the output after the last norm, not before it.
        mask: what rows feed from which it drafts several tokens at once; None: it drafts one token
            after the other.
        unused: entries of its config.json that change nothing here.
        hot_token_ids: the only tokens of the target that it drafts; empty for no bound.
    """

    layout: Layout
    target: Path
    target_hidden_size: int
    taps: Taps | None
    names: tuple[tuple[str, str], ...]
    only: tuple[str, ...]
    draft_vocab_size: int | None
    own_embedding: bool
    own_output: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fc_bias: bool
    fc_norm: bool
    norm_before_fc: bool
    norm_before_residual: bool
    carries_normed: bool
    mask: MaskInput | None
    unused: tuple[str, ...]
    hot_token_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        """The number of different tokens that it drafts."""
        return len(self.hot_token_ids) or self.draft_vocab_size or self.vocab_size

    @property
    def remark(self) -> str:
        reads = "the last hidden states" if self.taps is None else str(self.taps)
        if self.mask is not None and self.mask.depths:
            reads += f", trained for {self.mask.depths} drafts"
        unused = f"; without effect: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.layout.maker}'s layout, reads {reads}{unused}"


def load_head_config(
    path: str,
    architecture: str,
    target: ModelConfig,
    token_map: str | None = None,
    flag: str = "--model-path",
) -> DraftHeadConfig:
    """Reads the config.json of a head, and the names and shapes of its tensors, if they are there.

    Args:
        architecture: EAGLE, EAGLE3, NEXTN or DFLASH; published folders may not say which they are.
        target: the model that it drafts for.
        token_map: file of the only target ids that it drafts, see `read_token_map`.
        flag: what named the path.

    Raises:
        ModelPathError: for a folder that cannot be read, that is no such head, or a head of another
            target; the text names the entry.
        ValueError: for a token map that cannot be used.
    """
    folder = resolve_model_path(path, flag)
    entries, shapes = read_entries(folder), read_shapes(folder)
    layout = layout_of(entries, shapes)
    if architecture == NEXTN and not shapes and not (layout and layout.kind == NEXTN):
        layout = NATIVE  # the files are not there yet
    refuse(folder, layout_problem(entries, shapes, layout, architecture))
    assert layout is not None, "That is a problem."
    config = parse_model_config(folder, {**_flat(entries), "architectures": [architecture]})
    names = names_of(architecture, shapes)
    only = only_names(names, shapes) if architecture == NEXTN else ()
    stored = {renamed(name, names): name for name in shapes if not only or name.startswith(only)}
    facts = _facts(config, layout, stored)
    taps = read_taps(config, entries, target.num_layers) if architecture in IDS else None
    num_taps = 0 if taps is None else len(taps.layers)
    refuse(folder, head_problem(config, layout, facts, stored, num_taps, token_map is not None))
    hot = () if token_map is None else read_token_map(Path(token_map), target.vocab_size)
    head = DraftHeadConfig(
        **{**vars(config), **facts},
        layout=layout,
        target=target.path,
        taps=taps,
        mask=read_mask_input(config, shapes.get(stored.get(MASK_HIDDEN, ""), (1, 1)), layout),
        names=names,
        only=only,
        unused=() if only else _unused(entries, architecture),
        hot_token_ids=hot,
    )
    check_fits(head, target.vocab_size, target.hidden_size)
    refuse(folder, vocabulary_problem(folder, stored, head.vocab_size))
    return head


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all entries in one object: inner ones count, where they are not null. Ids of layers
    stay where they are, since their place says what they mean."""
    flat = dict(entries)
    for name in OBJECTS:
        inner = (entries.get(name) or {}).items()
        flat |= {key: value for key, value in inner if value is not None and key != LAYER_IDS}
    return flat


def _unused(entries: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Names entries that nothing reads, inner ones with their object."""
    used = used_entries(kind).union(OBJECTS)
    places = {"": entries, **{f"{name}.": entries.get(name) or {} for name in OBJECTS}}
    found = (place + key for place, inner in places.items() for key in inner if key not in used)
    return tuple(sorted(found))


def _facts(config: ModelConfig, layout: Layout, names: Collection[str]) -> dict[str, Any]:
    """Gives fields of `DraftHeadConfig` that follow from entries and from the head's names of the
    tensors in its files; without names from entries alone."""
    # Of NEXTN it is the target's, whose family may mean fewer biases.
    attention_bias = config.flag("attention_bias") and not (config.architecture == NEXTN and names)
    size = config.integer("target_hidden_size", None, minimum=1) or config.hidden_size
    draft_vocab_size = config.integer("draft_vocab_size", None, minimum=1)
    is_other = size != config.hidden_size
    return {
        "num_layers": _num_layers(config, layout, names),
        "target_hidden_size": size,
        "draft_vocab_size": draft_vocab_size,
        "own_embedding": EMBEDDING in names or is_other,
        "own_output": is_other
        or (draft_vocab_size not in (None, config.vocab_size))
        or (OUTPUT_HEAD in names if names else draft_vocab_size is not None),
        "qkv_bias": layout.qkv_bias or attention_bias or f"{SELF}q_proj.bias" in names,
        "output_bias": attention_bias or f"{SELF}o_proj.bias" in names,
        "mlp_bias": config.flag("mlp_bias") or "layers.0.mlp.gate_proj.bias" in names,
        "qk_norm": f"{SELF}q_norm.weight" in names,
        "fc_bias": FC_BIAS in names or config.flag("bias"),
        "fc_norm": config.flag("fc_norm") or config.flag("use_aux_norm"),
        "norm_before_fc": config.flag("norm_before_fc"),
        "norm_before_residual": config.flag("norm_before_residual"),
        "carries_normed": config.flag("norm_output"),
    }


def _num_layers(config: ModelConfig, layout: Layout, names: Collection[str]) -> int:
    """Counts layers by the tensors. Without them only the entry of speculators and DFlash says how
    many there are: in others it may be the target's."""
    if names:
        return len(layer_numbers(names))
    is_own = layout.maker == "speculators" or layout.kind == DFLASH
    return config.num_layers if is_own and config.architecture != NEXTN else 1
