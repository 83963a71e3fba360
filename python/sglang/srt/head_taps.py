"""Reads which layers of a target a head of EAGLE-3 or DFlash reads; no torch.

Two conventions name them: an id is the layer whose output is read, or the one whose input is read,
which is the output of the layer before. The place of the ids says which: in `eagle_config` and
`dflash_config` they name outputs (SGLang, SpecForge, z-lab), at the top of config.json inputs
(speculators, vLLM). A head that is run by the other convention than it was trained for only drafts
worse, so ids that are the usual ones of the other convention are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang.srt.head_layouts import (
    BLOCK_INPUTS,
    BLOCK_OPTIONS,
    BLOCK_OUTPUTS,
    DFLASH,
    EAGLE3,
    LAYER_IDS,
    NUM_LAYERS,
    OPTIONS,
)
from sglang.srt.model_config import ModelConfig


class _Ids(NamedTuple):
    """The entries of a kind of heads that name layers.

    Attributes:
        outputs: of ids of layers whose outputs are read.
        place: the object that has those.
        inputs: of ids of layers whose inputs are read.
        least: ids at least.
    """

    outputs: str
    place: str
    inputs: str
    least: int


IDS = {
    EAGLE3: _Ids(LAYER_IDS, OPTIONS, LAYER_IDS, least=2),
    DFLASH: _Ids(BLOCK_OUTPUTS, BLOCK_OPTIONS, BLOCK_INPUTS, least=1),
}


@dataclass(frozen=True, slots=True)
class Taps:
    """Says what a head of EAGLE-3 or DFlash reads.

    Attributes:
        layers: those of the target whose inputs it reads, ascending, for `HiddenCapture`.
        source: says by what they were chosen.
    """

    layers: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        *some, last = self.layers
        if not some:
            return f"the input of layer {last} ({self.source})"
        return f"the inputs of layers {', '.join(map(str, some))} and {last} ({self.source})"


def read_taps(config: ModelConfig, entries: Mapping[str, Any], num_layers: int) -> Taps:
    """Returns the layers of a target of `num_layers` that a head reads.

    Args:
        config: of the head, of a kind in IDS.
        entries: of its config.json.

    Raises:
        ModelPathError: if the target has no such layers, or the ids may mean two things.
    """
    ids = IDS[config.architecture]
    outputs = _layer_ids(config, ids.outputs, entries.get(ids.place) or {}, ids.least)
    inputs = _layer_ids(config, ids.inputs, entries, ids.least)
    usual = _usual(config, num_layers, len(outputs or inputs or ()))
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
        taps = Taps(by_output, f"ids in {ids.place} name the outputs of the layers before")
    elif inputs is not None:
        taps = Taps(inputs, "ids at the top of config.json name inputs")
    else:
        taps = Taps(usual, "the usual ones")
    if not _is_ascending(taps.layers) or taps.layers[-1] >= num_layers:
        read = [layer - 1 for layer in taps.layers]
        raise config.refusal(
            f"it reads the outputs of layers {read}, which must be in ascending order and below"
            f" the last one of the {num_layers} layers of the target;"
            f" use a head for this target, or name layers in {ids.outputs} of {ids.place}"
        )
    return taps


def usual_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose inputs EAGLE-3 heads read of a target of so many layers, unless they
    say otherwise. A target of few layers may lack some."""
    return 2, num_layers // 2, num_layers - 3


def _usual(config: ModelConfig, num_layers: int, count: int) -> tuple[int, ...]:
    """Returns the layers whose inputs heads of a kind usually read.

    Args:
        count: layers that the head names.

    Raises:
        ModelPathError: for a head of DFlash that names none, or was trained for a target with
            another number of layers.
    """
    if config.architecture == EAGLE3:
        return usual_layers(num_layers)
    of_target = config.integer(NUM_LAYERS, num_layers, minimum=1)
    if of_target != num_layers:
        raise config.refusal(
            f"{NUM_LAYERS} is {of_target}, but the target has {num_layers} layers; use a head that"
            " was trained for this target"
        )
    if count == 0:
        raise config.refusal(
            f"no layers of the target are named; write {BLOCK_OUTPUTS} of {BLOCK_OPTIONS}, those"
            " that it was trained with"
        )
    if count == 1:
        return (num_layers // 2 + 1,)
    distance = (num_layers - 4) / (count - 1)  # z-lab's: outputs from 1 to n - 3, evenly
    return tuple(1 + round(1 + each * distance) for each in range(count))


def _layer_ids(
    config: ModelConfig, name: str, entries: Mapping[str, Any], least: int
) -> tuple[int, ...] | None:
    ids = entries.get(name)
    if ids is None or ids == []:
        return None
    is_list = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not is_list or len(ids) < least or ids != sorted(set(ids)):
        count = "two layers" if least == 2 else "one layer"
        raise config.refusal(f"{name} must be at least {count} in ascending order, not {ids!r}")
    return tuple(ids)


def _is_ascending(layers: tuple[int, ...]) -> bool:
    return list(layers) == sorted(set(layers))


def _ambiguous(config: ModelConfig, one: tuple[int, ...], other: tuple[int, ...]) -> Exception:
    ids = IDS[config.architecture]
    first, second = ([layer - 1 for layer in layers] for layers in (one, other))
    names = " and ".join(dict.fromkeys((ids.outputs, ids.inputs)))
    return config.refusal(
        f"{names} cannot be told apart: by one reading it reads the outputs of layers {first},"
        f" by the other those of {second}; write both, those that it was trained with in"
        f" {ids.place}, and one more than each at the top"
    )
