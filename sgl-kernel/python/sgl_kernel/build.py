"""Ahead-of-time build: `python -m sgl_kernel.build [--arch 90a ...] [--out DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_kernel import _build


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles the library into the package, so that installs of it need no nvcc."""
    parser = argparse.ArgumentParser(prog="python -m sgl_kernel.build", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        help="architectures as nvcc names them, for example 80 89 90a; default: this GPU's",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=_build.PACKAGED_LIBRARY_DIR,
        help="folder of the library; default: the package, where the import finds it",
    )
    options = parser.parse_args(arguments)
    if options.arch is None and not torch.cuda.is_available():
        parser.error("no GPU here to take the architecture from: name one, for example --arch 90a")
    architectures = options.arch or [_build.architecture_of(torch.cuda.get_device_capability())]
    plan = _build.BuildPlan(
        _build.find_toolchain(), tuple(architectures), _build.find_source_root()
    )
    print(_build.compile_library(plan, options.out))


if __name__ == "__main__":
    main()
