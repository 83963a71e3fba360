"""The plots of docs/. Matplotlib, which only they need, is asked for when one is drawn, and set up
to write the same file for the same figures."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.mtp_checks import FIXED, K_1, KINDS, LOAD_AWARE, PLAIN, STATIC_3, VERIFIED

MISSING = "Plots need matplotlib, which is not installed here: pip install matplotlib"
GAPS = "gaps"
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
    """Where a result was measured."""
    machine: dict[str, str] = result["machine"]
    return machine.get("gpu", machine["cpu"])


def series(result: dict[str, Any], figure: str) -> dict[str, tuple[list[int], list[float]]]:
    """By kind: requests at once, ascending, and `tok_s` or `ratio_to_plain` there."""
    rows = sorted(result["rows"], key=lambda row: row["requests"])
    loads = [int(row["requests"]) for row in rows]
    return {
        kind: (loads, [float(row["kinds"][kind][figure]) for row in rows])
        for kind in KINDS
        if all(kind in row["kinds"] for row in rows)
    }


def draw_mtp_throughput(result: dict[str, Any], path: Path) -> None:
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


def layers(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Milliseconds by kind, one value per batch; the largest kind of all first, gaps last."""
    kinds = {kind for row in rows for kind in row["kinds_us"]}
    found = {kind: [row["kinds_us"].get(kind, 0.0) / 1e3 for row in rows] for kind in kinds}
    ordered = dict(sorted(found.items(), key=lambda item: (-sum(item[1]), item[0])))
    return {**ordered, GAPS: [row["idle_us"] / 1e3 for row in rows]}


def draw_step_profile(result: dict[str, Any], path: Path) -> None:
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


def draw_eagle_rounds(result: dict[str, Any], path: Path) -> None:
    """Milliseconds per token of a request, plain and with drafts, by requests at once."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    loads = [row["batch"] for row in result["rows"]]
    accepted = result["accept_length"]
    per_token = [row["round_ms"] / accepted for row in result["rows"]]
    axis.plot(loads, [row["plain_ms"] for row in result["rows"]], label=PLAIN, **STYLES[PLAIN])
    label = f"EAGLE, {result['num_steps']} steps, {accepted:g} tokens per round"
    axis.plot(loads, per_token, label=label, color="tab:blue", linewidth=2, marker="^")
    axis.set_xscale("log", base=2)
    axis.set_xticks(loads, [str(load) for load in loads])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests at once")
    axis.set_ylabel("ms per token of a request")
    axis.set_title(gpu_of(result))
    axis.legend()
    save_svg(figure, path)


def draw_adaptive_steps(result: dict[str, Any], path: Path) -> None:
    """Phase by phase: tokens per second beside the slowest way, tokens per step with drafts, and
    the steps at each phase's end."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 8), sharex=True)
    names = [phase["phase"].split(": ")[1] for phase in result["rows"][0]["phases"]]
    places = range(len(names))
    slowest = [min(way["phases"][place]["tok_s"] for way in result["rows"]) for place in places]
    for way in result["rows"]:
        phases = way["phases"]
        speeds = [phase["tok_s"] / least for phase, least in zip(phases, slowest, strict=True)]
        is_fixed = way["way"].startswith(("fixed", "no "))
        style = {"linestyle": "--" if is_fixed else "-", "linewidth": 1.2 if is_fixed else 2.2}
        axes[0].plot(places, speeds, marker="o", label=way["way"], **style)
        axes[1].plot(places, [phase["accept_length"] for phase in phases], marker="o", **style)
        axes[2].plot(places, [phase["steps_at_end"][-1] for phase in phases], marker="o", **style)
    axes[0].set_ylabel("tokens/s beside the slowest")
    axes[0].legend(fontsize="small")
    axes[1].set_ylabel("tokens per step with drafts")
    axes[2].set_ylabel("steps at the phase's end")
    axes[2].set_xticks(places, names, rotation=30, ha="right")
    axes[0].set_title(gpu_of(result))
    save_svg(figure, path)


def draw_tile_spec(result: dict[str, Any], path: Path) -> None:
    """Each way's speed beside no drafts, or beside the first way, by requests at once; milliseconds
    of a step by rows; and where it was measured, the share of drafts confirmed by score."""
    pyplot = load_pyplot()
    calibration = result.get("calibration")
    num_panels = 3 if calibration else 2
    figure, axes = pyplot.subplots(num_panels, 1, figsize=(8, 4 * num_panels))
    speeds, times = axes[:2]
    rows = result["rows"]
    loads, names = [row["requests"] for row in rows], [*rows[0]["tok_s"]]
    base = "plain" if "plain" in names else names[0]
    for name in names:
        beside = [median(row["tok_s"][name]) / median(row["tok_s"][base]) for row in rows]
        is_tiled = name.startswith("TileSpec")
        style = {"linestyle": "-" if is_tiled else "--", "linewidth": 2.2 if is_tiled else 1.2}
        speeds.plot(loads, beside, marker="o", label=name, **style)
    speeds.set_xlabel("requests at once")
    speeds.set_ylabel(f"tokens/s beside {base}")
    speeds.set_title(gpu_of(result))
    speeds.legend(fontsize="small")
    for key, label in (("graphs_ms", "graphs"), ("eager_ms", "without graphs")):
        measured = result["row_times"].get(key) or [[0, 0.0]]
        times.plot(*zip(*measured, strict=True), marker=".", label=label)
    for _, last in result["row_times"].get("segments", [])[:-1]:
        times.axvline(last, color="gray", linestyle=":")
    times.set_xlabel("rows of a step")
    times.set_ylabel("ms")
    times.legend(fontsize="small")
    if calibration:
        draw_calibration(calibration["rows"], axes[2])
    save_svg(figure, path)


def draw_calibration(rows: list[list[Any]], axis: Any) -> None:
    """The share confirmed and the chance predicted, by score; areas of points grow with drafts.

    Args:
        rows: of `ScoreCounts.result`.
        axis: matplotlib's.
    """
    tried = [row for row in rows if row[1]]
    most = max((count for _, count, _, _ in tried), default=1)
    axis.plot([0, 1], [0, 1], color="gray", linestyle=":", label="a chance that is the score")
    axis.plot(*zip(*((row[0], row[3]) for row in rows), strict=True), label="chance predicted")
    points = [(score, share, 8 + 120 * count / most) for score, count, share, _ in tried]
    if points:
        scores, shares, areas = zip(*points, strict=True)
        axis.scatter(scores, shares, s=areas, color="tab:orange", label="share confirmed")
    axis.set_xlabel("score of a draft")
    axis.set_ylabel("confirmed with all before it")
    axis.legend(fontsize="small")
