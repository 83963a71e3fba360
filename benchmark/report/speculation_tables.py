"""Tables of speculation beside plain decoding, and of ways to choose how many drafts there are."""

from __future__ import annotations

import statistics

from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    ADAPTIVE_OVER_FIXED_3,
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    MIN_SPEED_UP_OF_ACCEPT_LENGTH,
)
from benchmark.report.markdown import Result, table, verdict


def speculation_paired(results: list[Result]) -> str:
    """One row per number of requests."""
    rows = []
    for row in (row for result in results for row in result["rows"]):
        asked = MIN_SPEED_UP_OF_ACCEPT_LENGTH.get(row["requests"])
        is_fast = row["median"] >= MIN_PAIRED_MEDIAN and row["lowest"] >= MIN_PAIRED_ROUND
        rows.append(
            [
                str(row["requests"]),
                f"{row['median']:.2f}",
                f"{row['lowest']:.2f}",
                "yes" if is_fast else "**no**",
                f"{row['of_accept_length']:.2f}",
                "-" if asked is None else f"{asked:.2f}",
                "-" if asked is None else verdict(row["of_accept_length"], asked, is_least=True),
            ]
        )
    head = ["requests at once", "speed-up", "lowest round", "never below plain"]
    lines = [table([*head, "of the accept length", "asked", "reached"], rows)]
    for result in results:
        accepted, steps = result["rows"][0]["accept_length"], result["num_steps"]
        lines.append(
            f"{result['algorithm']}, up to {steps} drafts by load, {accepted:.2f} tokens per step"
            f" with drafts, {result['rounds']} rounds in turn.\n"
        )
    return "\n".join(lines)


def adaptive_steps(results: list[Result]) -> str:
    """Phases down, ways across: tokens per second, and tokens per step with drafts."""
    lines = []
    for result in results:
        ways, summary = result["rows"], result["summary"]
        rows = []
        for number, phase in enumerate(ways[0]["phases"]):
            cells = [way["phases"][number] for way in ways]
            shown = [f"{cell['tok_s']:,.0f} ({cell['accept_length']:.2f})" for cell in cells]
            rows.append([phase["phase"], *shown])
        speeds = [f"**{statistics.median(way['tok_s']):,.0f}**" for way in ways]
        rows.append(["all phases", *speeds])
        rows.append(["switches per second", *(f"{way['switches_per_s']:.2f}" for way in ways)])
        lines.append(table(["tokens/s", *(way["way"] for way in ways)], rows))
        best = f"the best fixed number, {summary['best_fixed']}"
        for key, asked, what in (
            ("over_best_fixed", ADAPTIVE_OVER_BEST_FIXED, best),
            ("over_fixed_3", ADAPTIVE_OVER_FIXED_3, "fixed 3"),
        ):
            found = summary[key]
            shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
            reached = verdict(max(found.values()), asked, is_least=True)
            lines.append(
                f"Beside {what}: {shown} (asked of the better one {asked:.2f}: {reached}).\n"
            )
    return "\n".join(lines)


def tile_spec(results: list[Result]) -> str:
    """Ways down, requests at once across: tokens per second and, with TileSpec, beside the best
    fixed number of drafts."""
    lines = []
    for result in results:
        rows, figures = result["rows"], []
        for way in rows[0]["tok_s"]:
            cells = []
            for row in rows:
                beside = row["tile_spec"].get(way, {}).get("over_best_static")
                speed = f"{statistics.median(row['tok_s'][way]):,.0f}"
                cells.append(speed if beside is None else f"{speed} ({beside:.3f})")
            figures.append([way, *cells])
        head = ["tokens/s", *(f"{row['requests']} at once" for row in rows)]
        lines.append(table(head, figures))
        best = ", ".join(f"{row['requests']}: {row['best_static']}" for row in rows)
        lines.append(f"In brackets: beside the best fixed number of drafts ({best}).\n")
        segments = result["row_times"].get("segments", [])
        ends = ", ".join(str(last) for _, last in segments[:-1])
        if ends:
            lines.append(f"Steps take 15 % longer or more behind so many rows: {ends}.\n")
    return "\n".join(lines)
