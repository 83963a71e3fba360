"""Reads the folder of a draft head: EAGLE, EAGLE-3, NEXTN or DFlash, layers over a target; no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.head_layouts import (
    ARCHITECTURES,
    DFLASH,
    EAGLE,
    EAGLE3,
    LAYER_IDS,
    MASK_HIDDEN,
    MISSING,
    NATIVE,
    NATIVE_NAMES,
    NEXTN,
    OBJECTS,
    SPECULATORS,
    SPECULATORS_TYPES,
    Layout,
    architecture_of,
    layout_of,
    names_of,
    renamed,
    used_entries,
)
from sglang.srt.head_masks import MaskInput, read_mask_input
from sglang.srt.head_taps import IDS, Taps, read_taps
from sglang.srt.head_tensors import read_shapes, vocabulary_problem
from sglang.srt.model_config import (
    ModelConfig,
    ModelPathError,
    parse_model_config,
    read_entries,
    resolve_model_path,
)
from sglang.srt.registry import FAMILY_DEFAULTS
from sglang.srt.token_map import TOKEN_MAP, read_token_map

LAYER = re.compile(r"layers\.(\d+)\.")
EMBEDDING, OUTPUT_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"
SELF = "layers.0.self_attn."
OF_EAGLE3 = ("fc_norm", "norm_before_fc", "norm_before_residual", "carries_normed")
# Values of --speculative-algorithm.
FLAGS = {EAGLE: "EAGLE", EAGLE3: "EAGLE3", NEXTN: "NEXTN", DFLASH: "DFLASH"}


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
            reads += f", trained with {self.mask.depths}"
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
    layout = _checked_layout(folder, entries, shapes, architecture)
    flat = _flat(folder, entries)
    if architecture == NEXTN:
        _check_family(folder, flat, shapes)
    config = parse_model_config(folder, {**flat, "architectures": [architecture]})
    names = names_of(architecture, shapes)
    only = _only_names(architecture, shapes, names)
    stored = {renamed(name, names): name for name in shapes if not only or name.startswith(only)}
    facts = _facts(config, layout, frozenset(stored))
    taps = None
    if architecture in IDS:
        taps = read_taps(config, entries, target.num_layers)
    if taps is not None and architecture == EAGLE3:
        _check_taps(config, taps)
    hot_token_ids: tuple[int, ...] = ()
    if token_map is not None:
        if config.hf.get("draft_vocab_size") is not None:
            raise config.refusal(
                f"draft_vocab_size says that the head has tokens of its own; remove {TOKEN_MAP}"
            )
        hot_token_ids = read_token_map(Path(token_map), target.vocab_size)
    head = DraftHeadConfig(
        **{**vars(config), **facts},
        layout=layout,
        target=target.path,
        taps=taps,
        mask=read_mask_input(config, shapes.get(stored.get(MASK_HIDDEN, ""), (1, 1)), layout),
        names=names,
        only=only,
        unused=() if only else _unused(entries, architecture),
        hot_token_ids=hot_token_ids,
    )
    check_fits(head, target.vocab_size, target.hidden_size)
    problem = vocabulary_problem(folder, stored, head.vocab_size)
    if problem is not None:
        raise ModelPathError(f"{folder} cannot be used: {problem}; is the file intact?")
    return head


def check_fits(head: DraftHeadConfig, vocab_size: int, hidden_size: int) -> None:
    """
    Raises:
        ModelPathError: if the head was not trained for a target of these sizes.
    """
    name = "hidden_size" if head.target_hidden_size == head.hidden_size else "target_hidden_size"
    for entry, of_head, of_target in (
        ("vocab_size", head.vocab_size, vocab_size),
        (name, head.target_hidden_size, hidden_size),
    ):
        if of_head != of_target:
            raise head.refusal(
                f"{entry} is {of_head}, but that of the target is {of_target}; use a head that was"
                " trained for this target"
            )


def _checked_layout(
    folder: Path, entries: Mapping[str, Any], tensors: Mapping[str, Any], architecture: str
) -> Layout:
    """
    Raises:
        ModelPathError: for a layout that is not known or that no drafter takes, or a head of the
            other kind.
    """
    layout, name = layout_of(entries, tensors), architecture_of(entries)
    if architecture == NEXTN and not (layout and layout.kind == NEXTN):
        if tensors:
            raise ModelPathError(
                f"{folder} has no layer of its own for multi-token prediction (tensors mtp.,"
                " model.mtp_layers. or eh_proj); name one that was trained for the model with"
                " --speculative-draft-model-path, or use another --speculative-algorithm."
            )
        return NATIVE
    problem = ""
    if layout is None:
        table, said = ARCHITECTURES, f"architecture {name!r}"
        if entries.get(SPECULATORS) is not None:
            table, said = SPECULATORS_TYPES, f"{SPECULATORS} {entries[SPECULATORS]!r}"
        known = ", ".join(key for key, each in table.items() if not each.problem)
        problem = f"{said} is of no head that is known; those that load are {known}"
    elif layout.problem:
        problem = f"{layout.problem}; use a head of EAGLE-3 or EAGLE that was trained for the model"
    elif layout.kind not in (None, architecture):
        problem = (
            f"architecture {name!r} is no head of the kind {architecture}; use"
            f" --speculative-algorithm {FLAGS[layout.kind]}"
        )
    elif architecture == EAGLE and entries.get("draft_vocab_size") is not None:
        problem = (
            "draft_vocab_size says that this is a head of EAGLE-3; use --speculative-algorithm"
            " EAGLE3"
        )
    if problem or layout is None:
        raise ModelPathError(f"{folder / 'config.json'} cannot be used: {problem}.")
    return layout


def _only_names(
    architecture: str, tensors: Mapping[str, Any], names: tuple[tuple[str, str], ...]
) -> tuple[str, ...]:
    """Returns the beginnings of the names of a head's tensors in the files of a whole model; none
    where the head has files of its own."""
    if architecture != NEXTN or "model.embed_tokens.weight" not in tensors:
        return ()
    numbered = (name for name, _ in names if name.startswith("model.layers."))
    return (*NATIVE_NAMES, *numbered)


def _check_family(folder: Path, entries: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """
    Raises:
        ModelPathError: for a layer of a family that is not here; the text names the reason.
    """
    family = entries.get("model_type")
    reasons = [reason for part, reason in MISSING.items() if any(part in it for it in tensors)]
    if family not in FAMILY_DEFAULTS or reasons:
        why = " and ".join(reasons) or "a form of its own"
        raise ModelPathError(
            f"{folder / 'config.json'} cannot be used: the layer for multi-token prediction (NEXTN)"
            f" of the family {family!r} has {why}, which is not here; use a dense one of"
            f" {', '.join(FAMILY_DEFAULTS)}."
        )


def _flat(folder: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all entries in one object: inner ones count, where they are not null. Ids of layers
    stay where they are, since their place says what they mean."""
    flat = dict(entries)
    for name in OBJECTS:
        inner = entries.get(name) or {}
        if not isinstance(inner, dict):
            raise ModelPathError(
                f"{folder / 'config.json'} cannot be used: {name} must be an object, not {inner!r}."
            )
        flat |= {
            key: value for key, value in inner.items() if value is not None and key != LAYER_IDS
        }
    return flat


def _unused(entries: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Names entries that nothing reads, inner ones with their object."""
    found, used = [], used_entries(kind)
    for name, value in entries.items():
        if name in OBJECTS:
            inner = value if isinstance(value, dict) else {}
            found += [f"{name}.{key}" for key in inner if key not in used]
        elif name not in used:
            found.append(name)
    return tuple(sorted(found))


def _check_taps(config: ModelConfig, taps: Taps) -> None:
    """
    Raises:
        ModelPathError: for entries that ask for other taps.
    """
    if "use_aux_hidden_state" in config.hf and not config.flag("use_aux_hidden_state"):
        raise config.refusal(
            "use_aux_hidden_state is false, which is not supported; use a head that reads several"
            " layers of its target"
        )
    count = len(taps.layers)
    asked = config.integer("num_aux_hidden_states", count, minimum=2) or count
    if asked != count:
        raise config.refusal(f"num_aux_hidden_states is {asked}, but {count} layers are read")
    if count * (config.hf.get("target_hidden_size") or config.hidden_size) == config.hidden_size:
        raise config.refusal(
            "target_hidden_size: what it reads of the target is as wide as its own output, so steps"
            " cannot be told apart"
        )


def _facts(config: ModelConfig, layout: Layout, names: frozenset[str]) -> dict[str, Any]:
    """Gives fields of `DraftHeadConfig` that follow from entries and from the head's names of the
    tensors in its files; without names from entries alone.

    Raises:
        ModelPathError: for entries that cannot be met.
    """
    is_eagle3, is_nextn = (config.architecture == kind for kind in (EAGLE3, NEXTN))
    # Of NEXTN it is the target's, whose family may mean fewer biases.
    attention_bias = config.flag("attention_bias") and not (is_nextn and names)
    size = config.integer("target_hidden_size", config.hidden_size, minimum=1)
    target_hidden_size = config.hidden_size if size is None else size
    draft_vocab_size = config.integer("draft_vocab_size", None, minimum=1)
    if draft_vocab_size is not None and draft_vocab_size > config.vocab_size:
        raise config.refusal(
            f"draft_vocab_size is {draft_vocab_size}, more than vocab_size {config.vocab_size}"
        )
    is_other = target_hidden_size != config.hidden_size
    facts = {
        "num_layers": _num_layers(config, layout, names),
        "target_hidden_size": target_hidden_size,
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
    if not is_eagle3:
        is_block = config.architecture == DFLASH
        wrong = [name for name in OF_EAGLE3 if facts[name]]
        wrong += ["target_hidden_size"] * (is_other and not is_block)
        if wrong:
            raise config.refusal(f"{wrong[0]} is of heads of EAGLE-3; is this one?")
    if facts["fc_norm"] and facts["norm_before_fc"]:
        raise config.refusal("fc_norm and norm_before_fc are both true, but a head has one of them")
    if is_eagle3 and layout.maker == "speculators" and "norm_before_residual" not in config.hf:
        raise config.refusal(
            "norm_before_residual is missing, which speculators reads as false and vLLM as true;"
            " write what it was trained with"
        )
    layer_types = config.hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.refusal(f"layer_types must be a list, not {layer_types!r}")
    if config.flag("use_sliding_window") or "sliding_attention" in layer_types:
        raise config.refusal("sliding windows of heads are not supported; use a head without them")
    return facts


def _num_layers(config: ModelConfig, layout: Layout, names: frozenset[str]) -> int:
    """Counts layers by the tensors. Without them only the entry of speculators and DFlash says how
    many there are: in others it may be the target's."""
    is_nextn = config.architecture == NEXTN
    if not names:
        if is_nextn:
            return 1
        is_own = layout.maker == "speculators" or layout.kind == DFLASH
        return config.num_layers if is_own else 1
    if "fc.weight" not in names:
        raise config.refusal(
            "the files lack 'fc.weight', so this is no head; a draft model takes"
            " --speculative-algorithm STANDALONE"
        )
    layers = {int(found[1]) for name in names if (found := LAYER.match(name))}
    if sorted(layers) != list(range(max(1, len(layers)))):
        raise config.refusal(f"the files have layers {sorted(layers)}, not all from 0 on")
    if is_nextn and layers != {0}:
        raise config.refusal(
            f"the files have {len(layers)} layers for multi-token prediction, but only one"
            " drafts here"
        )
    return len(layers)
