"""Kinds of requests that multi-token prediction is measured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TAU, MOST_K = 0.9, 8
PLAIN, VERIFIED = "plain", f"k={MOST_K} verified"
LOAD_AWARE = f"k={MOST_K} tau {TAU:g} load-aware"


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    Attributes:
        params: sampling parameters.
    """

    params: dict[str, Any]


_AHEAD = {"mtp_enabled": True, "mtp_k": MOST_K}
KINDS: dict[str, Kind] = {
    PLAIN: Kind({"temperature": 0}),
    LOAD_AWARE: Kind({**_AHEAD, "mtp_strategy": ["conf_adapt", TAU]}),
    VERIFIED: Kind({**_AHEAD, "mtp_verify": True, "temperature": 0}),
}
