"""Says what keeps a draft head from being used, and what to do instead; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.head_layouts import (
    ARCHITECTURES,
    DFLASH,
    EAGLE,
    EAGLE3,
    INNER,
    LAYER_IDS,
    MISSING,
    NEXTN,
    OBJECTS,
    SPECULATORS,
    SPECULATORS_TYPES,
    Layout,
    architecture_of,
    layer_numbers,
)
from sglang.srt.model_config import ModelConfig, ModelPathError
from sglang.srt.registry import FAMILY_DEFAULTS
from sglang.srt.token_map import TOKEN_MAP

if TYPE_CHECKING:
    from sglang.srt.head_config import DraftHeadConfig

OF_EAGLE3 = ("fc_norm", "norm_before_fc", "norm_before_residual", "carries_normed")
# Values of --speculative-algorithm.
FLAGS = {EAGLE: "EAGLE", EAGLE3: "EAGLE3", NEXTN: "NEXTN", DFLASH: "DFLASH"}


def refuse(folder: Path, problem: str) -> None:
    """
    Raises:
        ModelPathError: if there is a problem.
    """
    if problem:
        raise ModelPathError(f"{folder / 'config.json'} cannot be used: {problem}.")


def layout_problem(
    entries: Mapping[str, Any], tensors: Collection[str], layout: Layout | None, kind: str
) -> str:
    """Says why a head of a layout is none of a kind; empty if it is one."""
    name, said = architecture_of(entries), entries.get(SPECULATORS)
    for each in OBJECTS:
        if not isinstance(entries.get(each) or {}, dict):
            return f"{each} must be an object, not {entries[each]!r}; write one, or remove it"
    if kind == NEXTN and (layout is None or layout.kind != NEXTN):
        return (
            "the files have no layer for multi-token prediction (tensors mtp., model.mtp_layers. or"
            " eh_proj); name one that was trained for the model with"
            " --speculative-draft-model-path, or use another --speculative-algorithm"
        )
    if kind == NEXTN:
        return _family_problem(entries, tensors)
    if layout is None:
        table = ARCHITECTURES if said is None else SPECULATORS_TYPES
        which = f"architecture {name!r}" if said is None else f"{SPECULATORS} {said!r}"
        known = ", ".join(key for key, each in table.items() if not each.problem)
        return f"{which} is of no head that is known; use one of {known}"
    if layout.problem:
        return f"{layout.problem}; use a head of EAGLE-3 or EAGLE that was trained for the model"
    if layout.kind not in (None, kind):
        flag = f"--speculative-algorithm {FLAGS[layout.kind]}"
        return f"architecture {name!r} is no head of the kind {kind}; use {flag}"
    if kind == EAGLE and entries.get("draft_vocab_size") is not None:
        return "draft_vocab_size is of heads of EAGLE-3; use --speculative-algorithm EAGLE3"
    if tensors and not {"fc.weight", "model.fc.weight"}.intersection(tensors):
        said = "the files lack 'fc.weight', so this is no head; a draft model takes"
        return f"{said} --speculative-algorithm STANDALONE"
    return ""


def _family_problem(entries: Mapping[str, Any], tensors: Collection[str]) -> str:
    family = {**entries, **(entries.get(INNER) or {})}.get("model_type")
    reasons = [reason for part, reason in MISSING.items() if any(part in it for it in tensors)]
    if family in [*FAMILY_DEFAULTS] and not reasons:  # it may be an object
        return ""
    return (
        f"the layer for multi-token prediction (NEXTN) of the family {family!r} has"
        f" {' and '.join(reasons) or 'a form of its own'}, which is not here; use a dense one of"
        f" {', '.join(FAMILY_DEFAULTS)}"
    )


def head_problem(
    config: ModelConfig,
    layout: Layout,
    facts: Mapping[str, Any],
    names: Collection[str],
    num_taps: int,
    has_token_map: bool,
) -> str:
    """Says which entries, or names of tensors, of a head cannot be met; empty if all can.

    Args:
        facts: fields of `DraftHeadConfig`.
        names: the head's, of the tensors in its files; empty where there are none yet.
        num_taps: layers of the target that it reads.
    """
    hf, kind, layers = config.hf, config.architecture, layer_numbers(names)
    num_drafted, types = facts["draft_vocab_size"], hf.get("layer_types") or []
    is_list = isinstance(types, list)
    is_wider = kind not in (EAGLE3, DFLASH) and facts["target_hidden_size"] != config.hidden_size
    of_eagle3 = [name for name in OF_EAGLE3 if facts[name] and kind != EAGLE3]
    of_eagle3 += ["target_hidden_size"] * is_wider
    asked = config.integer("num_aux_hidden_states", num_taps, minimum=2) if num_taps else None
    is_nested = kind == EAGLE3 and layout.maker == "speculators"
    problems = {
        f"draft_vocab_size is {num_drafted}, more than vocab_size {config.vocab_size}; write how"
        " many tokens its lm_head has": (num_drafted or 0) > config.vocab_size,
        f"draft_vocab_size says that the head has tokens of its own; remove {TOKEN_MAP}": (
            has_token_map and num_drafted is not None
        ),
        f"the files have layers {layers}, not all from 0 on; use whole files": (
            layers != list(range(len(layers)))
        ),
        f"the files have {len(layers)} layers for multi-token prediction, but only one drafts here;"
        " use a model with one": kind == NEXTN and bool(names) and len(layers) != 1,
        f"{''.join(of_eagle3[:1])} is of heads of EAGLE-3; use --speculative-algorithm EAGLE3, or"
        " remove it": bool(of_eagle3),
        "fc_norm and norm_before_fc are both true, but a head has one of them; write false for the"
        " one whose tensors it lacks": facts["fc_norm"] and facts["norm_before_fc"],
        "norm_before_residual is missing, which speculators reads as false and vLLM as true; write"
        " what it was trained with": is_nested and "norm_before_residual" not in hf,
        "use_aux_hidden_state is false, which is not supported; use a head that reads several"
        " layers": "use_aux_hidden_state" in hf and not config.flag("use_aux_hidden_state"),
        f"num_aux_hidden_states is {asked}, but {num_taps} layers are read; name as many in"
        f" {LAYER_IDS}, or remove it": (asked or num_taps) != num_taps,
        "target_hidden_size: what it reads of the target is as wide as its own output, so steps"
        " cannot be told apart; use a head of another width": (
            kind == EAGLE3 and num_taps * facts["target_hidden_size"] == config.hidden_size
        ),
        f"layer_types must be a list, not {types!r}; write a list, or remove it": not is_list,
        "sliding windows of heads are not supported; use a head without them": (
            config.flag("use_sliding_window") or (is_list and "sliding_attention" in types)
        ),
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


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
            said = f"{entry} is {of_head}, but that of the target is {of_target}"
            raise head.refusal(f"{said}; use a head that was trained for this target")
