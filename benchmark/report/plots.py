"""The plots of docs/. Matplotlib, which only they need, is asked for when one is drawn, and set up
to write the same file for the same figures."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmark.experiments import ADAPTIVE
from benchmark.report.speculation_tables import shares_of_replay

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


def gpu_of(result: dict[str, Any]) -> str:
    """Names the machine on which a result was measured."""
    machine: dict[str, str] = result["machine"]
    return machine.get("gpu", machine["cpu"])


def draw_adaptive_steps(results: list[dict[str, Any]], path: Path) -> None:
    """Phase by phase: tokens per second beside the slowest way, tokens per step with drafts, and
    the steps at each phase's end."""
    (result,) = results
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
    axes[0].set_title(gpu_of(result))
    save_svg(figure, path)


def draw_replay_shares(results: list[dict[str, Any]], path: Path) -> None:
    """Requests at once across, each drafter's share of the speed of replayed drafts up."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, shares in shares_of_replay(results).items():
        ends = [[share[end] for share in shares.values()] for end in ("low", "high")]
        [line] = axes.plot([*shares], [share["mean"] for share in shares.values()], marker="o")
        line.set_label(name)
        axes.fill_between([*shares], *ends, alpha=0.2, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks([*shares], [str(load) for load in shares])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("of replayed drafts' tokens/s")
    axes.legend(fontsize="small")
    axes.set_title(gpu_of(results[0]))
    save_svg(figure, path)
