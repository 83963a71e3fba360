"""Reads a model directory: config.json and generation_config.json, no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.head_layouts import architecture_of
from sglang.srt.model_families import MAX_SIZE, impl_of, why_not_computed, why_not_known
from sglang.srt.plain_files import UnreadableFileError, read_json
from sglang.srt.registry import (
    FAMILY_DEFAULTS,
    HEADS,
    MODELS,
    OWN,
    TRANSFORMERS,
    TRANSFORMERS_MODEL,
)
from sglang.srt.rope_config import RopeConfig, parse_rope
from sglang.srt.shard import WHOLE, Shard
from sglang.srt.transformers_config import MAX_LAYERS, completed, why_not
from sglang.srt.weight_format import WeightFormat, format_of

DEMO_MODELS_DIR = Path(__file__).resolve().parent.parent / "demo_models"
SILU_NAMES = ("silu", "swish")
DEMO_MODELS = {"demo": "tiny-code"}
DEMO_HEADS = {
    "demo-eagle": "tiny-code-eagle",
    "demo-eagle3": "tiny-code-eagle3",
    "demo-nextn": "tiny-code-nextn",
}
DEMO_DRAFTS = {"demo-draft": "tiny-code-draft"}
Number = TypeVar("Number", int, float)
GENERATION_CONFIG = "generation_config.json"
AUTO = "auto"  # a value of --model-impl
DTYPES = ("float32", "bfloat16", "float16")  # names in torch of what weights and KV may be
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # as torch and SGLang have them


class ModelPathError(ValueError):
    """A model directory that is missing or cannot be read; the message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model.

    Attributes:
        path: resolved model directory.
        architecture: class name of the first entry of `architectures` (the registry's key).
        rope: rotary positions, the same in all layers.
        context_len: `max_position_embeddings` in tokens, and what a RoPE scaling adds to it.
        eos_token_ids: ids that end an output, of generation_config.json or else of config.json;
            `with_tokenizer_eos` adds the tokenizer's.
        hf: the whole config.json over its family's defaults; `flag` and `integer` read what one
            family needs beside this.
        generation: the whole generation_config.json; empty without one.
        warnings: lines on what was ignored.
        impl: whether a file of ours computes it, or transformers' own modelling code.
        rounds_weights: linear layers hold weights of 8 bits that the files have in 16 or 32.
        shard: the part of the weights and of the KV that this process holds. All sizes here are of
            the whole model.
    """

    path: Path
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_len: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    hf: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    impl: str = OWN
    rounds_weights: bool = False
    shard: Shard = WHOLE

    @property
    def weight_format(self) -> WeightFormat:
        """Gives the form of weights of 8 bits, whether there are any or not."""
        return format_of(self.hf)

    @property
    def remark(self) -> str:
        """Says in the start-up summary what is particular about it, if anything is."""
        return ""

    @property
    def folder(self) -> str:
        """Gives the model's folder as an absolute path, for processes elsewhere."""
        return os.path.abspath(self.path)

    def with_layers(self, num_layers: int) -> ModelConfig:
        """Gives the shape of a model of that many layers, whose last one is of the last one's kind;
        a sliding window begins no later than there, if it is in some layers alone."""
        hf, types = dict(self.hf), self.hf.get("layer_types")
        if isinstance(types, list) and types:
            hf["layer_types"] = [*types[: num_layers - 1], types[-1]]
        first = self.hf.get("max_window_layers")
        if isinstance(first, int) and first < self.num_layers:
            hf["max_window_layers"] = min(first, num_layers - 1)
        return replace(self, num_layers=num_layers, hf=hf)

    def flag(self, name: str) -> bool:
        """A boolean entry of config.json; missing and null are false."""
        value = self.hf.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{name} must be true or false, not {value!r}")
        return bool(value)

    def integer(self, name: str, default: int | None, minimum: int) -> int | None:
        """An entry of config.json; null is None, and a missing one is `default`.

        Raises:
            ModelPathError: for anything else than a number from `minimum` to MAX_SIZE.
        """
        value = self.hf.get(name, default)
        if value is None:
            return None
        if type(value) is not int or not minimum <= value <= MAX_SIZE:
            bounds = f"at least {minimum} and at most {MAX_SIZE}"
            raise self.refusal(f"{name} must be an integer of {bounds}, not {value!r:.40}")
        return value

    @property
    def model_class(self) -> str:
        """Names the class of the model, for `registry.load`."""
        if self.impl == TRANSFORMERS:
            return TRANSFORMERS_MODEL
        return {**MODELS.entries, **HEADS.entries}[self.architecture]

    def refusal(self, reason: str) -> ModelPathError:
        """The error to raise for an entry that cannot be met."""
        return _refusal(self.path, reason)


def resolve_model_path(model_path: str, flag: str = "--model-path") -> Path:
    """The directory that a flag, or a field of a call, names; `demo` is a bundled model,
    `demo-eagle`, `demo-eagle3` and `demo-nextn` are heads for it, `demo-draft` is a draft model.

    Raises:
        ModelPathError: if there is no such directory.
    """
    bundled = DEMO_MODELS | DEMO_HEADS | DEMO_DRAFTS
    if model_path in bundled:
        return DEMO_MODELS_DIR / bundled[model_path]
    path = os.path.expanduser(model_path)  # unlike Path's it leaves a user that there is not
    if not os.path.isdir(path):
        known = DEMO_HEADS | DEMO_DRAFTS if "draft" in flag else DEMO_MODELS
        names = ", ".join(f"`{name}`" for name in known)
        raise ModelPathError(
            f"{flag} {model_path!r} is not a directory. Give a local directory in Hugging"
            f" Face layout (config.json, *.safetensors, tokenizer.json), or {names}."
        )
    return Path(path)


def load_model_config(model_path: str, flag: str = "--model-path", impl: str = AUTO) -> ModelConfig:
    """Reads config.json (and generation_config.json, if there is one) of what a flag names.

    Args:
        impl: what computes it: `own`, `transformers`, or `auto` for transformers where no file of
            ours does.

    Raises:
        ModelPathError: if the directory or a file is missing, is not JSON or lacks a needed key.
    """
    path = resolve_model_path(model_path, flag)
    return parse_model_config(path, read_entries(path), impl)


def read_entries(path: Path) -> dict[str, Any]:
    """Reads config.json of a folder.

    Raises:
        ModelPathError: if there is none, or it is no JSON object.
    """
    return _read_json(path / "config.json")


def parse_model_config(path: Path, entries: dict[str, Any], impl: str = AUTO) -> ModelConfig:
    """Reads the entries of config.json, and the folder's generation_config.json, if there is one.

    Args:
        impl: as in `load_model_config`.

    Raises:
        ModelPathError: if a needed key is missing, or an entry cannot be met.
    """

    wished, impl = impl, _impl_of(entries, impl)
    config = _with_family_defaults(entries)
    problem = why_not_computed(config, impl) or why_not_known(config, impl)
    if problem is not None:
        raise _refusal(path, problem)
    if impl == TRANSFORMERS:
        config = _read_by_transformers(path, entries, is_wish=wished == TRANSFORMERS)
    try:
        parsed = _parse(path, config)
        _check_shape(parsed)
        if impl == TRANSFORMERS:
            hf = {**entries, "eos_token_id": config["eos_token_id"]}
            parsed = replace(parsed, hf=hf, impl=impl)
        else:
            _check_kind(config)
    except KeyError as error:
        raise ModelPathError(
            f"{path / 'config.json'} has no entry {error.args[0]!r}; is it the config of a"
            " decoder-only model?"
        ) from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise _refusal(path, str(error)) from None
    generation = path / GENERATION_CONFIG
    if generation.exists():
        parsed = replace(parsed, generation=_read_json(generation))
    return _with_eos(parsed)


def _impl_of(entries: dict[str, Any], wished: str) -> str:
    """Chooses what computes a model."""
    return impl_of(_with_family_defaults(entries)) if wished == AUTO else wished


def _read_by_transformers(path: Path, entries: dict[str, Any], is_wish: bool) -> dict[str, Any]:
    """Returns the entries of a model that transformers computes, with its defaults.

    Raises:
        ModelPathError: if it cannot compute it, or is not there.
    """
    problem = why_not(entries)
    if problem is not None:
        named = architecture_of(entries) or str(entries.get("model_type"))
        known = f"no file of ours computes {named!r:.80} (known: {', '.join(MODELS.names)})"
        why = "--model-impl transformers" if is_wish else known
        raise _refusal(path, f"{why}, and {problem}")
    try:
        return completed(entries)
    except (TypeError, ArithmeticError) as error:
        raise _refusal(path, str(error)) from None


def _refusal(path: Path, reason: str) -> ModelPathError:
    return ModelPathError(f"{path / 'config.json'} cannot be used: {reason}.")


def _with_family_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Fills in what is missing. A null entry stays null, as transformers has it."""
    return {**FAMILY_DEFAULTS.get(str(config.get("model_type")), {}), **config}


def _parse(path: Path, config: dict[str, Any]) -> ModelConfig:
    num_heads = _number(config, "num_attention_heads", int)
    if not (config["architectures"] and architecture_of(config)):
        raise ValueError("`architectures` names no model class")
    hidden_size = _number(config, "hidden_size", int)
    num_kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    rope = parse_rope(config)
    return ModelConfig(
        path=path,
        architecture=str(config["architectures"][0]),
        model_type=str(config["model_type"]),
        vocab_size=_number(config, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_number(config, "intermediate_size", int),
        num_layers=_number(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else int(num_kv_heads),
        head_dim=hidden_size // num_heads if head_dim is None else int(head_dim),
        rms_norm_eps=_number(config, "rms_norm_eps", float),
        rope=rope,
        context_len=int(_number(config, "max_position_embeddings", int) * rope.context_factor),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=(),
        hf=config,
    )


def _number(config: dict[str, Any], name: str, kind: Callable[[Any], Number]) -> Number:
    """An entry as an int or a float.

    Raises:
        KeyError: if there is none.
        ValueError: if it is no number; the text names it.
    """
    value = config[name]
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, not {value!r:.40}") from None


def _check_shape(config: ModelConfig) -> None:
    """Raises ValueError for sizes that no model can have."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
        "max_position_embeddings": config.context_len,
    }
    for name, size in sizes.items():
        most = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if not 1 <= size <= most:
            raise ValueError(f"{name} is {size!r:.40}, but must be at least 1 and at most {most}")
    if not 0 <= config.rms_norm_eps < 1:
        raise ValueError(f"rms_norm_eps is {config.rms_norm_eps}, but must be in [0, 1)")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads"
            f" {config.num_kv_heads}; if num_key_value_heads is missing, that is the default of"
            f" {config.model_type}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")


def _check_kind(config: dict[str, Any]) -> None:
    """Raises ValueError for what every model here would compute wrongly."""
    activation = config.get("hidden_act") or "silu"
    if activation not in SILU_NAMES:
        raise ValueError(
            f"hidden_act {activation!r} is not supported; use a checkpoint with"
            f" {' or '.join(SILU_NAMES)}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict)
    except UnreadableFileError as error:
        raise ModelPathError(f"{error}.") from None


def _with_eos(config: ModelConfig) -> ModelConfig:
    """The end-of-text ids of the first file that names one the model has; it can draw no others."""
    known: tuple[int, ...] = ()
    ignored = []
    for name, values in ((GENERATION_CONFIG, config.generation), ("config.json", config.hf)):
        path = config.path / name
        ids = _eos_ids(path, values)
        known = tuple(token_id for token_id in ids if 0 <= token_id < config.vocab_size)
        unknown = [token_id for token_id in ids if token_id not in known]
        ignored += [f"{unknown} in {path}"] if unknown else []
        if known:
            break
    if not ignored:
        return replace(config, eos_token_ids=known)
    warning = (
        f"eos_token_id: ignoring {' and '.join(ignored)}, outside of the model's vocab_size"
        f" {config.vocab_size}."
    )
    return replace(config, eos_token_ids=known, warnings=(warning,))


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        raise ModelPathError(f"eos_token_id in {path} must be a token id or a list of them.")
    return tuple(ids)
