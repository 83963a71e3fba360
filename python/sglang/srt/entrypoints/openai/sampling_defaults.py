"""Sampling parameters of the model's generation_config.json, for OpenAI's routes."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.sampling_validation import check_sampling_params
from sglang.srt.model_config import GENERATION_CONFIG, ModelConfig

logger = logging.getLogger(__name__)

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults_of(model: ModelConfig, limits: RequestLimits) -> dict[str, Any]:
    """Reads the parameters that the file gives, whatever its `do_sample` says. Values that no
    request could have are left out, with one warning for all.

    Args:
        limits: those of a request, without the server's preferred parameters.
    """
    found, wrong = dict[str, Any](), list[str]()
    for name in NAMES:
        value = model.generation.get(name)
        if value is None:
            continue
        if name == "top_k" and value == 0:
            value = -1  # transformers keeps all tokens then
        try:
            check_sampling_params({name: value}, limits, GENERATION_CONFIG)
        except RequestError as error:
            wrong.append(error.message.removeprefix(f"{GENERATION_CONFIG}.").rstrip("."))
        else:
            found[name] = value
    if wrong:
        path = model.path / GENERATION_CONFIG
        logger.warning("Ignoring sampling parameters of %s: %s.", path, "; ".join(wrong))
    return found


def describe_sampling(flag: str, defaults: dict[str, Any]) -> str:
    """Says in a line of the start-up summary what requests of `/v1/*` get that give nothing.

    Args:
        flag: --sampling-defaults.
    """
    if flag == "openai":
        return "OpenAI's defaults, as --sampling-defaults asks"
    if not defaults:
        return f"OpenAI's defaults, as the model has none in {GENERATION_CONFIG}"
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"{values} of {GENERATION_CONFIG}, where a /v1 request gives none"
