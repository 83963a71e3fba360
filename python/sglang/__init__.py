"""SGLang's interface with adaptive multi-token decoding at its core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang.srt.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "SamplingParams", "ServerArgs", "__version__"]

_LAZY = {
    "Engine": "sglang.srt.entrypoints.engine",
    "SamplingParams": "sglang.srt.sampling.sampling_params",
    "ServerArgs": "sglang.srt.server_args",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, so that `import sglang` costs nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'sglang' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
