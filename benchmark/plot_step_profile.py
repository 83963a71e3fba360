"""Draws docs/step_profile.svg from benchmark/results/step_profile.json: milliseconds of a decode
step by kind of kernel. Needs matplotlib, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plotting import gpu_of, load_pyplot, plot_command, save_svg

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmark" / "results" / "step_profile.json"
PLOT = ROOT / "docs" / "step_profile.svg"
GAPS = "gaps"


def layers(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Milliseconds by kind, one value per batch; the largest kind of all first, gaps last."""
    kinds = {kind for row in rows for kind in row["kinds_us"]}
    found = {kind: [row["kinds_us"].get(kind, 0.0) / 1e3 for row in rows] for kind in kinds}
    ordered = dict(sorted(found.items(), key=lambda item: (-sum(item[1]), item[0])))
    return {**ordered, GAPS: [row["idle_us"] / 1e3 for row in rows]}


def draw(result: dict[str, Any], path: Path) -> None:
    """Stacked bars."""
    pyplot = load_pyplot()
    rows = result["rows"]
    figure, axis = pyplot.subplots(figsize=(8, 4.8))
    names = [row["load"].replace(", ", ",\n") for row in rows]
    bottom = [0.0] * len(rows)
    for kind, values in layers(rows).items():
        color = {"color": "lightgray"} if kind == GAPS else {}
        axis.bar(names, values, bottom=bottom, label=kind, **color)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    walls = [row["wall_us"] / 1e3 for row in rows]
    axis.plot(names, walls, "k_", markersize=24, label="wall time, not profiled")
    axis.set_xlabel("what a step feeds")
    axis.set_ylabel("milliseconds per step")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.set_title(f"{result['geometry']}, random weights, {gpu_of(result)}", fontsize=10)
    save_svg(figure, path)


if __name__ == "__main__":
    plot_command(__doc__ or "", draw, "step_profile.py", RESULT, PLOT)
