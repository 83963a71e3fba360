"""The plots of docs/. Matplotlib, which only they need, is asked for when one is drawn, and set up
to write the same file for the same figures."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmark.experiments import ADAPTIVE

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


def draw_adaptive_steps(result: dict[str, Any], path: Path) -> None:
    """Phase by phase: tokens per second beside the slowest way, tokens per step with drafts, and
    the steps at each phase's end."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 8), sharex=True)
    phases = [row for row in result["rows"] if row["load"] != ["all"]]
    names = [f"{row['load'][0]} {row['load'][1]}" for row in phases]
    places = range(len(names))

    def medians(way: str, figure: str = "tok_s") -> list[float]:
        return [statistics.median(row["ways"][way][figure]) for row in phases]

    ways = [*phases[0]["ways"]]
    slowest = [*map(min, zip(*map(medians, ways), strict=True))]
    for way in ways:
        speeds = [speed / least for speed, least in zip(medians(way), slowest, strict=True)]
        ends = [row["ways"][way]["steps_at_end"][-1] for row in phases]
        is_fixed = way not in ADAPTIVE
        style = {"linestyle": "--" if is_fixed else "-", "linewidth": 1.2 if is_fixed else 2.2}
        axes[0].plot(places, speeds, marker="o", label=way, **style)
        axes[1].plot(places, medians(way, "accept_length"), marker="o", **style)
        axes[2].plot(places, ends, marker="o", **style)
    axes[0].set_ylabel("tokens/s beside the slowest")
    axes[0].legend(fontsize="small")
    axes[1].set_ylabel("tokens per step with drafts")
    axes[2].set_ylabel("steps at the phase's end")
    axes[2].set_xticks(places, names, rotation=30, ha="right")
    axes[0].set_title(result["machine"].get("gpu", result["machine"]["cpu"]))
    save_svg(figure, path)
