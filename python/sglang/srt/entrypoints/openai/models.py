"""`/v1/models`."""

from __future__ import annotations

import time
from typing import Any

START_TIME = int(time.time())


def describe_models(name: str, context_len: int) -> dict[str, Any]:
    """The answer of `/v1/models`."""
    return {"object": "list", "data": [describe_model(name, context_len)]}


def describe_model(name: str, context_len: int) -> dict[str, Any]:
    """The answer of `/v1/models/{name}`."""
    return {
        "id": name,
        "object": "model",
        "created": START_TIME,
        "owned_by": "sglang-adaptive",
        "root": name,
        "parent": None,
        "max_model_len": context_len,
    }
