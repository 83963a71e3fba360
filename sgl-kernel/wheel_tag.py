"""Says which platforms a wheel is for: that of a compiled library, if it carries one."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = Path(__file__).parent / "python/sgl_kernel/lib/libsgl_kernel.so"


class WheelTag(BuildHookInterface):  # type: ignore[type-arg]
    """Binds a wheel with a library to this platform; its functions are plain C, so any Python 3
    loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Sets the tag before the wheel is built."""
        if version == "standard" and LIBRARY.is_file():
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
