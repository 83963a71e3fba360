"""Tables of speculation beside plain decoding, and of ways to choose how many drafts there are."""

from __future__ import annotations

import statistics

from benchmark.experiments import DRAFTED, PLAIN
from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    ADAPTIVE_OVER_FIXED_3,
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    STATIONARY_OVER_BEST_FIXED,
    SWITCH_US,
    TIERS_MEMORY_RATIO,
    is_steady,
)
from benchmark.report.markdown import Result, table, verdict


def adaptive_steps(results: list[Result]) -> str:
    """Phases down, ways across: tokens per second, and tokens per step with drafts."""
    (result,) = results
    ways, summary = result["rows"], result["summary"]
    rows = []
    for number, phase in enumerate(ways[0]["phases"]):
        cells = [way["phases"][number] for way in ways]
        shown = [f"{cell['tok_s']:,.0f} ({cell['accept_length']:.2f})" for cell in cells]
        rows.append([phase["phase"], *shown])
    speeds = [f"**{statistics.median(way['tok_s']):,.0f}**" for way in ways]
    rows.append(["all phases", *speeds])
    rows.append(["switches per second", *(f"{way['switches_per_s']:.2f}" for way in ways)])
    lines = [table(["tokens/s", *(way["way"] for way in ways)], rows)]
    best, asked_of = summary["best_fixed"], {"over_fixed_3": ("fixed 3", ADAPTIVE_OVER_FIXED_3)}
    if best != "fixed 3":
        what = f"the best fixed number, {best}"
        asked_of = {"over_best_fixed": (what, ADAPTIVE_OVER_BEST_FIXED), **asked_of}
    for key, (what, asked) in asked_of.items():
        found = summary[key]
        text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        reached = verdict(max(found.values()), asked, is_least=True)
        lines.append(f"Beside {what}: {text} (asked of the better one {asked:.2f}: {reached}).\n")
    if sum(_is_fixed(way) for way in ways) > 1:
        lines.append(
            "With the best fixed number of each phase, or none, known beforehand:"
            f" {_best_of_phases(ways, 'fixed 3'):.3f} times fixed 3.\n"
        )
    return "\n".join(lines)


def _is_fixed(way: Result) -> bool:
    return bool(way["way"].startswith(("fixed", "no drafts")))


def _best_of_phases(ways: list[Result], base: str) -> float:
    """Returns how much faster than `base` all phases would be, each by the fastest way that is not
    adaptive."""
    fixed = [way["phases"] for way in ways if _is_fixed(way)]
    own = next(way["phases"] for way in ways if way["way"] == base)
    best_s = sum(1 / max(phase["tok_s"] for phase in phases) for phases in zip(*fixed, strict=True))
    return float(sum(1 / phase["tok_s"] for phase in own) / best_s)


def adaptive_stationary(results: list[Result]) -> str:
    """One row per load and adaptive way, beside no drafts and the load's best fixed number."""
    (result,) = results
    head = ["requests at once", "way", "tokens/s", "best fixed number", "beside that"]
    head += ["beside no drafts", "lowest round", "switches/s", "reached"]
    rows = []
    for load in result["rows"]:
        speeds = {way["way"]: f"{way['tok_s']:,.0f}" for way in load["ways"]}
        best = load["best_fixed"]
        for way in (way for way in load["ways"] if way["is_adaptive"]):
            figures = [way[name] for name in ("over_best_fixed", "over_plain", "lowest_over_plain")]
            rows.append(
                [
                    f"{load['requests']} {load['kind']}",
                    way["way"],
                    speeds[way["way"]],
                    f"{speeds[best]} ({best})",
                    *(f"{figure:.3f}" for figure in figures),
                    f"{way['switches_per_s']:.2f}",
                    "yes" if is_steady(way) else "**no**",
                ]
            )
    asked = [
        f"Asked: beside the best fixed number {STATIONARY_OVER_BEST_FIXED:.2f}, beside no drafts",
        f"{MIN_PAIRED_MEDIAN:.2f} and in no round below {MIN_PAIRED_ROUND:.2f}.",
        "Medians of the rounds; rounds:",
        f"{result['rounds']}.",
    ]
    return table(head, rows) + "\n" + " ".join(asked) + "\n"


def adaptive_costs(results: list[Result]) -> str:
    """Host time of a switch by batch size, and memory of graphs by configuration."""
    (result,) = results
    times, memory = [], []
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


def shares_of_replay(results: list[Result]) -> dict[str, dict[int, Result]]:
    """Returns the ratio to replayed drafts, as `Interval.stored`, by drafter and requests at
    once."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        for row in result["rows"]:
            for pair, ratio in row["ratios"].items():
                mine, other = pair.split(" / ")
                if other != PLAIN:
                    name = f"{_drafter(result, mine)} / {other}"
                    found.setdefault(name, {})[row["load"][0]] = ratio
    return found


def replay_shares(results: list[Result]) -> str:
    """Requests at once across; one row per drafter and replay: its share of the speed of replayed
    drafts, then one per way: milliseconds of a round, tokens per round, and of these the share that
    is left beside plain decoding."""
    shares = shares_of_replay(results)
    loads = sorted({load for each in shares.values() for load in each})
    rows = [
        [name, *(f"{each[load]['mean']:.3f}" if load in each else "-" for load in loads)]
        for name, each in shares.items()
    ]
    rounds: dict[str, dict[int, str]] = {}
    for result in results:
        for row in result["rows"]:
            for way in row["ways"]:
                told = rounds.setdefault(f"{_drafter(result, way)}, per round", {})
                told.setdefault(row["load"][0], _round(row, way))
    rows += [[name, *(each.get(load, "-") for load in loads)] for name, each in rounds.items()]
    return table(["requests at once", *map(str, loads)], rows)


def _drafter(result: Result, way: str) -> str:
    return str(result["algorithm"]) if way == DRAFTED else way


def _round(row: Result, way: str) -> str:
    """Milliseconds of a round with its share of prompts, tokens, and how much of them is kept."""
    tok_s, tokens = (
        statistics.median(row["ways"][way][name]) for name in ("tok_s", "tokens_per_step")
    )
    text = f"{row['load'][0] * tokens / tok_s * 1e3:.2f} ms, {tokens:.2f}"
    over_plain = row["ratios"].get(f"{way} / {PLAIN}")
    return text if over_plain is None else f"{text}, {over_plain['mean'] / tokens:.2f}"
