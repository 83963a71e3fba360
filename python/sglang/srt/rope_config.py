"""Reads rotary positions from config.json, in the spellings of transformers 4 and 5; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10_000.0
ORIGINAL_CONTEXT = "original_max_position_embeddings"
SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595, section 2.3): all frequencies divided by factor."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's form: only wavelengths long against the original context are stretched.

    Attributes:
        low_freq_factor, high_freq_factor: turns within the original context below which a frequency
            is divided by `factor`, and above which it stays; between them the two are mixed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4).

    Attributes:
        attention_factor: scales cos and sin, and so queries and keys (the paper's sqrt(1/t)).
        beta_fast, beta_slow: turns within the original context that bound the mixed dimensions.
        truncate: whether those bounds are rounded outwards to whole dimensions.
    """

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_context_len: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of all layers of a model.

    Attributes:
        context_factor: what the context grows by beyond `max_position_embeddings`. It is above 1
            only where that entry is still the context from before the scaling: with linear, and
            with yarn that names no original context of its own.
    """

    theta: float = DEFAULT_THETA
    scaling: RopeScaling | None = None
    context_factor: float = 1.0


def parse_rope(config: dict[str, Any]) -> RopeConfig:
    """Reads `rope_parameters`, or else `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: for a scaling that is not supported, or lacks an entry; the text names it.
    """
    parameters = _object(config, "rope_parameters")
    chosen = _object(config, "rope_scaling") or parameters
    if any(isinstance(value, dict) for value in chosen.values()):
        raise ValueError(
            "rope_parameters by layer type are not supported; use a checkpoint whose layers share"
            " one RoPE"
        )
    kind = chosen.get("rope_type") or chosen.get("type") or "default"
    if kind not in SUPPORTED_TYPES:
        raise ValueError(
            f"RoPE scaling {kind!r} is not supported; use a checkpoint with one of"
            f" {', '.join(SUPPORTED_TYPES)}, or remove the scaling to serve the original context"
        )
    for source in (chosen, config):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                "partial_rotary_factor is not supported; use a checkpoint that rotates whole heads"
            )
    theta = (
        chosen.get("rope_theta")
        or config.get("rope_theta")
        or parameters.get("rope_theta")
        or DEFAULT_THETA
    )
    theta = _number({"rope_theta": theta}, "rope_theta")
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, but must be above 1")
    if kind == "linear":
        factor = _number(chosen, "factor")
        return RopeConfig(
            theta=theta, scaling=LinearScaling(factor=factor), context_factor=max(factor, 1.0)
        )
    if kind == "llama3":
        return RopeConfig(theta=theta, scaling=_parse_llama3(config, chosen))
    if kind == "yarn":
        return _parse_yarn(config, chosen, theta)
    return RopeConfig(theta=theta)


def _parse_llama3(config: dict[str, Any], values: dict[str, Any]) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_number(values, "factor"),
        low_freq_factor=_number(values, "low_freq_factor"),
        high_freq_factor=_number(values, "high_freq_factor"),
        original_context_len=_original_context_len(config, values),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError("high_freq_factor of the RoPE scaling must be above low_freq_factor")
    return scaling


def _parse_yarn(config: dict[str, Any], values: dict[str, Any], theta: float) -> RopeConfig:
    original = _original_context_len(config, values)
    if values.get("factor") is None:
        # The ratio of the contexts is the factor then.
        factor = int(config["max_position_embeddings"]) / original
    else:
        factor = _number(values, "factor")
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError("truncate of the RoPE scaling must be true or false")
    scaling = YarnScaling(
        factor=factor,
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=_number(values, "beta_fast") if values.get("beta_fast") else 32.0,
        beta_slow=_number(values, "beta_slow") if values.get("beta_slow") else 1.0,
        truncate=truncate,
        original_context_len=original,
    )
    names_original = _stated_original(config, values) is not None
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        context_factor=1.0 if names_original else max(factor, 1.0),
    )


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    """The stated one, or 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22); with `mscale` and
    `mscale_all_dim`, the ratio of two such terms, each with its own weight."""
    if values.get("attention_factor") is not None:
        return _number(values, "attention_factor")

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        ours, all_dims = _number(values, "mscale"), _number(values, "mscale_all_dim")
        return temperature(ours) / temperature(all_dims)
    return temperature(1.0)


def _stated_original(config: dict[str, Any], values: dict[str, Any]) -> Any:
    outer = config.get(ORIGINAL_CONTEXT)
    return values.get(ORIGINAL_CONTEXT) if outer is None else outer


def _original_context_len(config: dict[str, Any], values: dict[str, Any]) -> int:
    stated = _stated_original(config, values)
    length = config["max_position_embeddings"] if stated is None else stated
    return int(_number({ORIGINAL_CONTEXT: length}, ORIGINAL_CONTEXT))


def _object(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _number(values: dict[str, Any], name: str) -> float:
    """A finite number above 0."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} of the RoPE parameters must be a number above 0, not {value!r}")
    return float(value)
