"""Reads the folder of a draft head: EAGLE and EAGLE-3, one layer over a target; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.plain_files import UnreadableFileError, read_bytes, read_json

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
UNNAMED = "LlamaForCausalLM"  # what heads from EAGLE's authors call themselves
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_TAPS = 3
TOKEN_MAP = "--speculative-token-map"
MAX_TOKEN_MAP_BYTES = 1 << 26
# Entries under which other forward passes were trained, at the top or in `eagle_config`.
REFUSED_FLAGS = ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual")


def load_head_config(
    path: str,
    architecture: str,
    target: ModelConfig,
    token_map: str | None = None,
    flag: str = "--model-path",
) -> ModelConfig:
    """Reads the config.json of a head.

    Args:
        architecture: EAGLE or EAGLE3; published folders may not say which they are.
        target: the model that it drafts for.
        token_map: file of the only target ids that it drafts, see `read_token_map`.
        flag: what named the path.

    Raises:
        ModelPathError: for a folder that cannot be read, that is no such head, or a head of another
            target; the text names the entry.
        ValueError: for a token map that cannot be used.
    """
    config = load_model_config(path, flag)
    if config.architecture not in (UNNAMED, architecture):
        raise config.refusal(
            f"architecture {config.architecture!r} is no head of the kind {architecture}; use the"
            " --speculative-algorithm that it was trained for"
        )
    if config.num_layers != 1:
        raise config.refusal(
            f"num_hidden_layers is {config.num_layers}, but a head has 1; a draft model takes"
            " --speculative-algorithm STANDALONE"
        )
    config = replace(config, architecture=architecture)
    check_fits(config, target.vocab_size, target.hidden_size)
    if architecture == EAGLE and config.hf.get("draft_vocab_size") is not None:
        raise config.refusal(
            "draft_vocab_size says that this is a head of EAGLE-3; use --speculative-algorithm"
            " EAGLE3"
        )
    if architecture == EAGLE3:
        entries = Eagle3Config.of(config)
        tap_layers(config, target.num_layers)
        if token_map is not None and entries.draft_vocab_size is not None:
            raise config.refusal(
                f"draft_vocab_size says that the head has tokens of its own; remove {TOKEN_MAP}"
            )
    if token_map is None:
        return config
    return replace(config, hot_token_ids=read_token_map(Path(token_map), target.vocab_size))


def check_fits(head: ModelConfig, vocab_size: int, hidden_size: int) -> None:
    """
    Raises:
        ModelPathError: if the head was not trained for a target of these sizes.
    """
    for name, of_head, of_target in (
        ("vocab_size", head.vocab_size, vocab_size),
        ("hidden_size", head.hidden_size, hidden_size),
    ):
        if of_head != of_target:
            raise head.refusal(
                f"{name} is {of_head}, but that of the target is {of_target}; use a head that was"
                " trained for this target"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """The settings of EAGLE-3 heads beside the shape of their layer.

    Attributes:
        draft_vocab_size: tokens of the head's own output; None if it uses the target's.
        num_taps: layers of the target whose outputs a prompt's rows are made of.
        layer_ids: those layers, in ascending order; None for the usual ones.
        carries_normed: the next draft step reads the output after the last norm, not before it.
    """

    draft_vocab_size: int | None
    num_taps: int
    layer_ids: tuple[int, ...] | None
    carries_normed: bool

    @classmethod
    def of(cls, config: ModelConfig) -> Eagle3Config:
        """
        Raises:
            ModelPathError: for entries that cannot be met.
        """
        options = config.hf.get("eagle_config") or {}
        if not isinstance(options, dict):
            raise config.refusal(f"eagle_config must be an object, not {options!r}")
        for source in (replace(config, hf=options), config):
            for name in REFUSED_FLAGS:
                if source.flag(name):
                    raise config.refusal(f"{name} is not supported; use a head without it")
            if "use_aux_hidden_state" in source.hf and not source.flag("use_aux_hidden_state"):
                raise config.refusal(
                    "use_aux_hidden_state is false, which is not supported; use a head that reads"
                    " several layers of its target"
                )
        hidden_size = config.integer("target_hidden_size", config.hidden_size, minimum=1)
        if hidden_size not in (None, config.hidden_size):
            raise config.refusal(
                f"target_hidden_size is {hidden_size}, but only heads of the target's own"
                f" hidden_size ({config.hidden_size}) are supported"
            )
        layer_ids = _layer_ids(config, options)
        default = NUM_TAPS if layer_ids is None else len(layer_ids)
        num_taps = config.integer("num_aux_hidden_states", default, minimum=2) or default
        if num_taps != default:
            raise config.refusal(
                f"num_aux_hidden_states is {num_taps}, but {default} layers are read"
                f" ({LAYER_IDS} names them)"
            )
        draft_vocab_size = config.integer("draft_vocab_size", None, minimum=1)
        if draft_vocab_size is not None and draft_vocab_size > config.vocab_size:
            raise config.refusal(
                f"draft_vocab_size is {draft_vocab_size}, more than vocab_size {config.vocab_size}"
            )
        return cls(
            draft_vocab_size=draft_vocab_size,
            num_taps=num_taps,
            layer_ids=layer_ids,
            carries_normed=config.flag("norm_output"),
        )


def tap_layers(head: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """The layers of a target of `num_layers` whose inputs an EAGLE-3 head reads, for
    `HiddenCapture`: that of layer i is the output of layer i - 1.

    Raises:
        ModelPathError: if the target has no such layers.
    """
    layer_ids = Eagle3Config.of(head).layer_ids
    if layer_ids is None:
        layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    else:
        layers = tuple(layer + 1 for layer in layer_ids)
    if list(layers) != sorted(set(layers)) or layers[-1] >= num_layers:
        raise head.refusal(
            f"it reads the outputs of layers {[layer - 1 for layer in layers]}, in ascending order"
            f" and below the last one, which a target of {num_layers} layers does not have; use a"
            f" head for this target, or name layers in {LAYER_IDS} of eagle_config"
        )
    return layers


def _layer_ids(config: ModelConfig, options: dict[str, Any]) -> tuple[int, ...] | None:
    ids = options.get(LAYER_IDS)
    if ids is None:
        return None
    is_list = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not is_list or len(ids) < 2 or ids != sorted(set(ids)):
        raise config.refusal(
            f"{LAYER_IDS} must be at least two layers in ascending order, not {ids!r}"
        )
    return tuple(ids)


def read_token_map(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The target ids of a head's own tokens: a list in JSON, or a safetensors file that holds one
    tensor of integers.

    Raises:
        ValueError: for a file that holds something else; the text names the flag and the remedy.
    """
    ids: Any = None
    if path.suffix == ".json" or path.suffix == ".safetensors":
        try:
            if path.suffix == ".json":
                ids = read_json(path, list, MAX_TOKEN_MAP_BYTES)
            else:
                ids = _ids_of_safetensors(read_bytes(path, MAX_TOKEN_MAP_BYTES))
        except UnreadableFileError as error:
            raise ValueError(f"{TOKEN_MAP} {error}.") from None
        except (ValueError, TypeError, SafetensorError) as error:
            raise ValueError(f"{TOKEN_MAP} {path} cannot be read: {error}.") from None
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            f"{TOKEN_MAP} {path} is no list of token ids; give a .json file with a list, or a"
            " .safetensors file with one tensor of integers."
        )
    wrong = [each for each in ids if type(each) is not int or not 0 <= each < vocab_size]
    if wrong:
        raise ValueError(
            f"{TOKEN_MAP} {path} has {wrong[0]!r}, but token ids are integers below the target's"
            f" vocab_size {vocab_size}; use the map that belongs to this target."
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{TOKEN_MAP} {path} has a token id twice; name each once.")
    return tuple(ids)


def _ids_of_safetensors(raw: bytes) -> Any:
    try:
        values = [*safetensors.numpy.load(raw).values()]
    except KeyError:  # a type that numpy does not have
        return None
    if len(values) != 1 or values[0].ndim != 1 or values[0].dtype.kind not in "iu":
        return None
    return values[0].tolist()
