"""Tables of speculation beside plain decoding, and of ways to choose how many drafts there are."""

from __future__ import annotations

import statistics

from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    ADAPTIVE_OVER_FIXED_3,
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    STATIONARY_OVER_BEST_FIXED,
    SWITCH_US,
    SWITCHES_PER_S,
    TIERS_MEMORY_RATIO,
    is_steady,
)
from benchmark.report.markdown import Result, table, verdict


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
        lines.append(
            "With the best fixed number of each phase, or none, known beforehand:"
            f" {_best_of_phases(ways, 'fixed 3'):.3f} times fixed 3.\n"
        )
    return "\n".join(lines)


def _best_of_phases(ways: list[Result], base: str) -> float:
    """How much faster than `base` all phases would be, each by the fastest way that is not
    adaptive."""
    fixed = [way["phases"] for way in ways if way["way"].startswith(("fixed", "no drafts"))]
    own = next(way["phases"] for way in ways if way["way"] == base)
    best_s = sum(1 / max(phase["tok_s"] for phase in phases) for phases in zip(*fixed, strict=True))
    return float(sum(1 / phase["tok_s"] for phase in own) / best_s)


def adaptive_stationary(results: list[Result], way_name: str) -> str:
    """A table per result: one row per load, of one adaptive way, beside no drafts and the load's
    best fixed number."""
    head = ["requests at once", "way", "tokens/s", "best fixed number", "beside that"]
    head += ["beside no drafts", "lowest round", "switches/s", "reached"]
    tables = []
    for result in results:
        rows = []
        for load in result["rows"]:
            speeds = {way["way"]: f"{way['tok_s']:,.0f}" for way in load["ways"]}
            best = load["best_fixed"]
            for way in (way for way in load["ways"] if way["way"] == way_name):
                rows.append(
                    [
                        f"{load['requests']} {load['kind']}",
                        way["way"],
                        speeds[way["way"]],
                        f"{speeds[best]} ({best})",
                        f"{way['over_best_fixed']:.3f}",
                        f"{way['over_plain']:.3f}",
                        f"{way['lowest_over_plain']:.3f}",
                        f"{way['switches_per_s']:.2f}",
                        "yes" if is_steady(way) else "**no**",
                    ]
                )
        measured = f"Commit {result['commit'][:12]}, {result['rounds']} rounds in turn:"
        tables.append(f"{measured}\n\n{table(head, rows)}\n")
    asked = [
        f"Asked: beside the best fixed number {STATIONARY_OVER_BEST_FIXED:.2f}, beside no drafts",
        f"{MIN_PAIRED_MEDIAN:.2f} and in no round below {MIN_PAIRED_ROUND:.2f}, fewer than",
        f"{SWITCHES_PER_S:g} switches per second. Medians of the rounds.",
    ]
    return "".join(tables) + " ".join(asked) + "\n"


def adaptive_costs(results: list[Result]) -> str:
    """Host time of a switch by batch size, and memory of graphs by configuration."""
    times, memory = [], []
    for result in results:
        for row in result["rows"]:
            switches, policies = row["switch_us"], row["policy_us"]
            cells = [*switches.values(), *policies.values(), row["most_us"]]
            reached = "yes" if row["most_us"] < SWITCH_US else "**no**"
            times.append([str(row["batch"]), *(f"{us:.1f}" for us in cells), reached])
        for row in result["memory"]:
            sizes = [f"{row[key]:,} MiB" for key in ("deepest_mib", "all_mib")]
            reached = verdict(row["ratio"], TIERS_MEMORY_RATIO, is_least=False)
            memory.append([row["config"], *sizes, f"{row['ratio']:.2f}", reached])
    head = [f"between {pair}" for pair in switches] + [f"policy `{name}`" for name in policies]
    asked = f"most, asked below {SWITCH_US:g}"
    text = table(["requests; microseconds of the host", *head, asked, "reached"], times)
    names = ["configuration", "graphs of the deepest tier alone", "of all tiers"]
    names += [f"asked up to {TIERS_MEMORY_RATIO:g}", "reached"]
    return f"{text}\n{table(names, memory)}" if memory else text
