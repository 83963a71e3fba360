"""Draws docs/mtp_throughput.svg from benchmark/results/mtp_gpu.json: tokens per second by requests
at once, and beside plain decoding. Needs matplotlib, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_checks import FIXED, K_1, KINDS, LOAD_AWARE, PLAIN, STATIC_3, VERIFIED
from plotting import gpu_of, load_pyplot, plot_command, save_svg

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmark" / "results" / "mtp_gpu.json"
PLOT = ROOT / "docs" / "mtp_throughput.svg"
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "black", "linewidth": 2, "marker": "o"},
    K_1: {"color": "gray", "linestyle": ":"},
    STATIC_3: {"color": "tab:brown", "linestyle": "-."},
    **{
        name: {"color": f"C{index}", "alpha": 0.6, "linestyle": "--"}
        for index, name in enumerate(FIXED.values())
    },
    LOAD_AWARE: {"color": "tab:red", "linewidth": 2.5, "marker": "s"},
    VERIFIED: {"color": "tab:blue", "linewidth": 2, "marker": "^"},
}


def series(result: dict[str, Any], figure: str) -> dict[str, tuple[list[int], list[float]]]:
    """By kind: requests at once, ascending, and `tok_s` or `ratio_to_plain` there."""
    rows = sorted(result["rows"], key=lambda row: row["requests"])
    loads = [int(row["requests"]) for row in rows]
    return {
        kind: (loads, [float(row["kinds"][kind][figure]) for row in rows])
        for kind in KINDS
        if all(kind in row["kinds"] for row in rows)
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels over the same axis of requests."""
    pyplot = load_pyplot()
    figure, (speed, ratio) = pyplot.subplots(1, 2, figsize=(12, 4.8))
    panels = (
        (speed, "tok_s", "output tokens per second"),
        (ratio, "ratio_to_plain", "beside plain decoding"),
    )
    for axis, name, label in panels:
        for kind, (loads, values) in series(result, name).items():
            axis.plot(loads, values, label=kind, **STYLES[kind])
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [str(load) for load in loads])
        axis.set_xlabel("requests at once")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    speed.set_yscale("log")
    ratio.set_ylim(bottom=0.0)
    ratio.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{result['model']}, held-out code, {gpu_of(result)}", fontsize=10)
    save_svg(figure, path)


if __name__ == "__main__":
    plot_command(__doc__ or "", draw, "mtp_gpu.py", RESULT, PLOT)
