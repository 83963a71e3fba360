"""Reads the config.json of a model that transformers' own modelling code computes.

transformers is an extra package. It is imported only where one of these functions is called. Only
classes of the package itself are used: what `auto_map` names in a model's folder never runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from sglang.srt.model_families import why_not_computed
from sglang.srt.registry import TRANSFORMERS

INSTALL = "pip install 'sglang-adaptive[transformers]'"
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_LAYERS = 1024  # more than any model has; its configs make lists of so many entries
NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
WRONG_ENTRIES = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, OSError)
WITH_PARTS = "ForConditionalGeneration"  # ends names of models that read more than text
# Entries that choose code or weights, or label classes, and none of a decoder's shape.
NOT_SHAPE = (
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "id2label",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "quantization_config",
    "return_dict",
    "torchscript",
    "use_cache",
)
OF_ALL_PARTS = ("dtype", "torch_dtype", "eos_token_id", "mtp_mask_token_id", "tie_word_embeddings")


def why_not(entries: Mapping[str, Any]) -> str | None:
    """Returns why transformers' modelling code cannot serve a model, with what to do instead; None
    if nothing in its config.json speaks against it.

    Args:
        entries: of config.json.
    """
    problem = why_not_installed()
    if problem is not None:
        return problem
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = text_entries(entries)
    model_type = str(text.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return (
            f"transformers has no model_type {model_type!r:.80}; use a checkpoint of a model that"
            " it has, or a newer transformers"
        )
    for name in NUMBERS_OF_LAYERS:
        if isinstance(count := text.get(name), int) and count > MAX_LAYERS:
            return f"{name} is {count}, but must be at most {MAX_LAYERS}"
    try:
        config = read_config(text)
        config.to_dict()  # some wrong entries show only there
    except (*WRONG_ENTRIES, StrictDataclassError) as error:
        return f"transformers cannot read it ({in_one_line(error)})"
    return _why_not_entries(text, config) or _why_not_class(model_type, config, entries)


def why_not_installed() -> str | None:
    """Says how to install transformers; None if it is there."""
    if importlib.util.find_spec("transformers") is None:
        return f"it takes transformers, which is not installed; run: {INSTALL}"
    return None


def text_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of the part that reads and writes text, where a model has several."""
    text = entries.get("text_config")
    if not isinstance(text, dict):
        return dict(entries)
    shared = {name: entries[name] for name in OF_ALL_PARTS if name in entries}
    found: dict[str, Any] = {**shared, **text}
    if "model_type" not in found:  # as old checkpoints of Llava have it
        found["model_type"] = "llama"
    return found


def read_config(entries: Mapping[str, Any]) -> Any:
    """Makes transformers' config of a decoder.

    Raises:
        KeyError: if transformers does not know its `model_type`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kept = {
        name: value
        for name, value in entries.items()
        if name not in NOT_SHAPE and not name.startswith("_") and name != "model_type"
    }
    return CONFIG_MAPPING[str(entries.get("model_type"))](**kept)


def model_class(config: Any) -> Any:
    """Returns transformers' class of a decoder with an output head.

    Raises:
        KeyError: if there is none for a config of this class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def completed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that `parse_model_config` reads, of a model for which `why_not` is None:
    under Llama's names, with transformers' defaults, and without a rotation, which is left to
    transformers' code."""
    text = text_entries(entries)
    config = read_config(text)
    read = Entries(config)
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    num_kv_heads, head_dim = read("num_key_value_heads"), read("head_dim")
    return {
        "architectures": [model_class(config).__name__],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": read("intermediate_size") or 4 * hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": hidden_size // num_heads if head_dim is None else head_dim,
        "rms_norm_eps": 0.0,  # its norms know their own
        "max_position_embeddings": _context_len(config),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "dtype": text.get("dtype") or text.get("torch_dtype"),
        "eos_token_id": entries.get("eos_token_id", read("eos_token_id")),
    }


class Entries:
    """Reads entries of a config of transformers by the names that most models have.

    Args:
        config: any of its configs.
    """

    def __init__(self, config: Any) -> None:
        self._values, self._names = config.to_dict(), config.attribute_map

    def __call__(self, name: str) -> Any:
        """None for an entry that there is not."""
        return self._values.get(self._names.get(name, name))

    @property
    def rotations(self) -> list[dict[str, Any]]:
        """The rotary parameters, of each type of layers or of all."""
        found = self("rope_parameters") or {}
        by_type = [each for each in found.values() if isinstance(each, dict)]
        return by_type or [found]


def in_one_line(error: BaseException) -> str:
    """Returns an error's type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _why_not_class(model_type: str, config: Any, entries: Mapping[str, Any]) -> str | None:
    """Judges by the code that transformers has for a model."""
    try:
        kind = model_class(config)
    except KeyError:
        return f"transformers has no model that writes text for model_type {model_type!r}"
    named = [str(each) for each in entries.get("architectures") or ()][:1]
    of_parts = isinstance(entries.get("text_config"), dict)
    if named and named[0] != kind.__name__ and not (of_parts and named[0].endswith(WITH_PARTS)):
        return f"transformers' code for {model_type} is {kind.__name__}, not {named[0]!r}"
    if kind._is_stateful:
        return (
            f"layers of {model_type} keep a recurrent state, which is not supported; use a model"
            " whose layers all attend"
        )
    if not kind._supports_attention_backend:
        return (
            f"transformers' code for {model_type} computes attention by itself, not by its"
            " attention interface"
        )
    return None


def _why_not_entries(given: Mapping[str, Any], config: Any) -> str | None:
    """Judges by the entries of a config, those `given` first."""
    read = Entries(config)
    problem = why_not_computed({**config.to_dict(), **given}, TRANSFORMERS)
    if problem is not None:
        return problem
    others = set(read("layer_types") or ()) - set(LAYER_TYPES)
    if others:
        return f"layers of type {min(others)!r} are not supported; only {' and '.join(LAYER_TYPES)}"
    if any(rotation.get("rope_type") == "dynamic" for rotation in read.rotations):
        return (
            "a RoPE scaling of type 'dynamic' rotates by the longest request of a batch; remove"
            " the scaling to serve the original context"
        )
    if read("use_bidirectional_attention"):
        return "use_bidirectional_attention says that tokens see later ones; use a causal decoder"
    return None


def _context_len(config: Any) -> Any:
    """Returns the most tokens of a request. With a rotation of type `longrope`, which depends on
    whether a request is longer than the original context, that context."""
    read = Entries(config)
    longest = read("max_position_embeddings")
    for rotation in read.rotations:
        if rotation.get("rope_type") == "longrope":
            original = rotation.get("original_max_position_embeddings")
            longest = min(longest, original or longest)
    return longest
