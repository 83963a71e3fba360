"""Matplotlib, which only the plots need: asked for when a plot is drawn, and set up to write the
same file for the same figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = "Plots need matplotlib, which is not installed here: pip install matplotlib"


def load_pyplot() -> Any:
    """matplotlib.pyplot, without a display.

    Raises:
        SystemExit: if there is none; the message names the remedy.
    """
    try:
        import matplotlib
    except ImportError:
        sys.exit(MISSING)
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sglang"  # names of elements, random otherwise
    from matplotlib import pyplot

    return pyplot


def save_svg(figure: Any, path: Path) -> None:
    """Without the date."""
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    # Matplotlib ends lines of path data with blanks.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def read_result(path: Path, script: str) -> dict[str, Any]:
    """A stored result.

    Raises:
        SystemExit: if it is not there; the message names the script that makes it.
    """
    if not path.is_file():
        sys.exit(f"There is no {path.name} in {path.parent.name}/ yet: python benchmark/{script}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def plot_command(
    description: str,
    draw: Callable[[dict[str, Any], Path], None],
    script: str,
    result: Path,
    plot: Path,
) -> None:
    """The command line of a plot: draws a stored result of `script`."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--result", type=Path, default=result)
    parser.add_argument("--out", type=Path, default=plot)
    arguments = parser.parse_args()
    draw(read_result(arguments.result, script), arguments.out)
    print(f"drawn: {arguments.out}")


def gpu_of(result: dict[str, Any]) -> str:
    """Where a result was measured."""
    machine: dict[str, str] = result["machine"]
    return machine.get("gpu", machine["cpu"])
