"""Reads which layers of a target an EAGLE-3 head reads; no torch.

Two conventions name them: an id is the layer whose output is read, or the one whose input is read,
which is the output of the layer before. The place of the ids says which: in `eagle_config` they
name outputs (SGLang, SpecForge), at the top of config.json inputs (speculators, vLLM). A head that
is run by the other convention than it was trained for only drafts worse, so ids that are the usual
ones of the other convention are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.head_layouts import LAYER_IDS, OPTIONS
from sglang.srt.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Taps:
    """Says what an EAGLE-3 head reads.

    Attributes:
        layers: those of the target whose inputs it reads, ascending, for `HiddenCapture`.
        source: says by what they were chosen.
    """

    layers: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        *some, last = self.layers
        return f"the inputs of layers {', '.join(map(str, some))} and {last} ({self.source})"


def read_taps(config: ModelConfig, entries: Mapping[str, Any], num_layers: int) -> Taps:
    """Returns the layers of a target of `num_layers` that a head reads.

    Args:
        config: of the head, for errors.
        entries: of its config.json.

    Raises:
        ModelPathError: if the target has no such layers, or the ids may mean two things.
    """
    usual = usual_layers(num_layers)
    options = entries.get(OPTIONS) or {}
    outputs = _layer_ids(config, options.get(LAYER_IDS))
    inputs = _layer_ids(config, entries.get(LAYER_IDS))
    by_output = None if outputs is None else tuple(layer + 1 for layer in outputs)
    shifted = tuple(layer - 1 for layer in usual)
    if by_output is not None and inputs is not None:
        if by_output != inputs:
            raise _ambiguous(config, by_output, inputs)
    elif outputs is not None and outputs == usual and _is_ascending(usual):
        raise _ambiguous(config, tuple(layer + 1 for layer in usual), usual)
    elif inputs is not None and inputs == shifted and _is_ascending(usual):
        raise _ambiguous(config, usual, shifted)
    if by_output is not None:
        taps = Taps(by_output, f"ids in {OPTIONS} name the outputs of the layers before")
    elif inputs is not None:
        taps = Taps(inputs, "ids at the top of config.json name inputs")
    else:
        taps = Taps(usual, "the usual ones")
    if not _is_ascending(taps.layers) or taps.layers[-1] >= num_layers:
        read = [layer - 1 for layer in taps.layers]
        raise config.refusal(
            f"it reads the outputs of layers {read}, which must be in ascending order and below"
            f" the last one of the {num_layers} layers of the target;"
            f" use a head for this target, or name layers in {LAYER_IDS} of eagle_config"
        )
    return taps


def usual_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose inputs EAGLE-3 heads read of a target of so many layers, unless they
    say otherwise. A target of few layers may lack some."""
    return 2, num_layers // 2, num_layers - 3


def _layer_ids(config: ModelConfig, ids: Any) -> tuple[int, ...] | None:
    if ids is None or ids == []:
        return None
    is_list = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not is_list or len(ids) < 2 or ids != sorted(set(ids)):
        raise config.refusal(
            f"{LAYER_IDS} must be at least two layers in ascending order, not {ids!r}"
        )
    return tuple(ids)


def _is_ascending(layers: tuple[int, ...]) -> bool:
    return list(layers) == sorted(set(layers))


def _ambiguous(config: ModelConfig, one: tuple[int, ...], other: tuple[int, ...]) -> Exception:
    first, second = ([layer - 1 for layer in layers] for layers in (one, other))
    return config.refusal(
        f"{LAYER_IDS} cannot be told apart: by one reading it reads the outputs of layers {first},"
        f" by the other those of {second}; write both, those that it was trained with in {OPTIONS},"
        " and one more than each at the top"
    )
