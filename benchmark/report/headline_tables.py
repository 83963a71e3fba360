"""The tables of `benchmark.headline`: figures beside what is asked of them, and the peer's."""

from __future__ import annotations

from typing import Any

from benchmark.goals import HEADLINE, HeadlineGoal, is_reached
from benchmark.report.markdown import Result, table

LOADS = (1, 8, 64, 128)
DECODING = {
    **{f"decode, {size}": f"{size} at once" for size in (1, 8, 32, 64, 128)},
    "decode, 1 at 30,000": "1, after 30,000 tokens",
}
PROMPTS = {
    **{f"1 x {size}": f"1 x ({size} in, 1 out)" for size in ("4,096", "16,384", "30,000")},
    "16 x 8,192": "16 x (8,192 in, 129 out)",
    "64 x 2,048": "64 x (2,048 in, 129 out)",
    "128 x 1,024": "128 x (1,024 in, 129 out)",
    "256 sharing 4,096": "256 x (4,160 in, 64 out), 4,096 of them shared",
    "128 x 4,096": "128 x (4,096 in, 64 out)",
    "512 x 512": "512 x (512 in, 128 out)",
}
HTTP = {f"HTTP, {name}": name for name in ("output", "first token p50", "gap p99")}
EAGLE = {
    **{f"EAGLE, {size}": f"{size} at once" for size in (1, 8, 32, 64, 128)},
    "EAGLE, 512 x 512": PROMPTS["512 x 512"],
}
LOOK_AHEAD = {
    f"{way} / {base}, {count}": f"{way} / {base}, {count} at once"
    for way, base, counts in (
        ("conf_adapt", "plain", LOADS),
        ("verified", "plain", LOADS),
        ("TileSpec", "plain", LOADS[:-1]),
        ("TileSpec", "7 drafts", LOADS[:-1]),
        ("TileSpec", "3 drafts", LOADS[:-1]),
        ("TileSpec", "best fixed drafts", LOADS[-2:-1]),
    )
    for count in counts
}
START = {"start, cold": "empty caches of compiled code", "start, warm": "full caches"}
PAGE = {  # by the name of a table in docs/performance.md
    "decoding": DECODING,
    "prompts": PROMPTS,
    "http": HTTP,
    "eagle": EAGLE,
    "look_ahead": LOOK_AHEAD,
    "start": START,
}
FIRST = {
    "decode, 1": "a decode step, 1 at once",
    "decode, 128": "a decode step, 128 at once",
    "1 x 4,096": "a prompt of 4,096 tokens",
    "512 x 512": "512 prompts of 512 tokens, 128 new ones each",
    "HTTP, output": "128 streams over HTTP, 512 in, 128 out",
    "HTTP, first token p50": "their first token, p50",
    "HTTP, gap p99": "between two of their tokens, p99",
    "EAGLE, 128": "a round of EAGLE, 3 drafts, 128 at once",
    "verified / plain, 1": "verified multi-token prediction / plain, 1 at once",
    "verified / plain, 128": "the same, 128 at once",
    "TileSpec / plain, 1": "TileSpec / plain, 1 at once",
    "TileSpec / plain, 64": "the same, 64 at once",
    "start, cold": "from start to first token, empty caches",
    "start, warm": "the same, full caches",
}


def measured(result: Result) -> str:
    """Says where all figures are from."""
    machine, versions = result["machine"], result["versions"]
    where = machine.get("gpu") or machine["cpu"]
    driver = f"driver {machine['driver']}, " if "driver" in machine else ""
    cuda = f", CUDA {versions['cuda']}" if "cuda" in versions else ""
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
    text = f"{where}, {driver}torch {versions['torch']}{cuda}; commit {result['commit'][:12]};"
    text += f" `{result['command']}` ({parts}).\n"
    if result["missing"]:
        text += f"\nNot measured at this commit: {', '.join(result['missing'])}.\n"
    return text


def figures(result: Result, names: dict[str, str]) -> str:
    """Makes rows for figures by name; one that was not measured says so.

    Args:
        names: what is shown of a figure's name.
    """
    found = {figure["name"]: figure for figure in result["figures"]}
    rows = []
    for name, shown in names.items():
        goal, figure = HEADLINE.get(name), found.get(name)
        peer = "-" if goal is None or goal.peer is None else _number(goal.peer)
        row = [shown, "not measured" if figure is None else _value(figure)]
        rows.append([*row, *_judgement(figure, goal), peer])
    return table(["", "measured", "asked", "reached", "peer"], rows)


def _judgement(figure: dict[str, Any] | None, goal: HeadlineGoal | None) -> list[str]:
    if goal is None:
        return ["-", "-"]
    asked = _number(goal.asked) + (f", no round below {goal.lowest:g}" if goal.lowest else "")
    if figure is None:
        return [asked, "-"]
    return [asked, "yes" if is_reached(figure, goal) else "**no**"]


def _value(figure: dict[str, Any]) -> str:
    """Gives a value with its unit, of a ratio with its interval and number of rounds."""
    interval = figure["interval"]
    if interval is None:
        return f"{_number(figure['value'])} {figure['unit']}"
    ends = f"{interval['low']:.3f} to {interval['high']:.3f}"
    return f"{figure['value']:.3f} ({ends}, {len(interval['ratios'])} rounds)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
