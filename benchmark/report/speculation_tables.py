"""Tables of speculation beside plain decoding, and of ways to choose how many drafts there are."""

from __future__ import annotations

import operator
import statistics

from benchmark.experiments import ADAPTIVE, DRAFTED, FIXED, PLAIN
from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    ADAPTIVE_OVER_FIXED_3,
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    STATIONARY_OVER_BEST_FIXED,
    SWITCH_US,
    TIERS_MEMORY_RATIO,
)
from benchmark.report.markdown import Result, table, verdict


def _median(row: Result, way: str, name: str = "tok_s") -> float:
    return float(statistics.median(row["ways"][way][name]))


def adaptive_steps(result: Result) -> str:
    """Phases down, ways across: tokens per second, and tokens per step with drafts."""
    *phases, whole = result["rows"]
    ways = [*whole["ways"]]
    rows = []
    for number, row in enumerate(phases, 1):
        cells = [
            f"{_median(row, way):,.0f} ({_median(row, way, 'accept_length'):.2f})" for way in ways
        ]
        rows.append([f"{number}: {row['load'][0]} {row['load'][1]}", *cells])
    rows.append(["all phases", *(f"**{_median(whole, way):,.0f}**" for way in ways)])
    rows.append(["switches per second", *(f"{_switches(phases, way):.2f}" for way in ways)])
    best = max((way for way in ways if way not in ADAPTIVE), key=lambda way: _median(whole, way))
    asked_of = {"fixed 3": ADAPTIVE_OVER_FIXED_3}
    if best != "fixed 3":
        asked_of = {best: ADAPTIVE_OVER_BEST_FIXED, **asked_of}
    lines = [table(["tokens/s", *ways], rows)]
    for other, asked in asked_of.items():
        found = {
            way: whole["ratios"][f"{way} / {other}"]["median"] for way in ways if way in ADAPTIVE
        }
        text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        reached = verdict(max(found.values()), asked, is_least=True)
        lines.append(f"Beside {other}: {text} (asked of the better one {asked:.2f}: {reached}).\n")
    return "\n".join(lines)


def _switches(phases: list[Result], way: str) -> float:
    """Switches per second of phases that all have the same number of tokens."""
    seconds = [1 / _median(row, way) for row in phases]
    rates = [_median(row, way, "switches_per_s") for row in phases]
    return sum(map(operator.mul, rates, seconds)) / sum(seconds)


def adaptive_stationary(result: Result) -> str:
    """One row per load and adaptive way, beside plain decoding and the load's best fixed number."""
    head = ["requests at once", "way", "tokens/s", "best fixed number", "beside that"]
    head += ["beside no drafts", "lowest round", "switches/s", "reached"]
    rows = []
    for row in result["rows"]:
        best = max((way for way in row["ways"] if way in FIXED), key=lambda way: _median(row, way))
        for way in (way for way in row["ways"] if way in ADAPTIVE):
            over_best, over_plain = (row["ratios"][f"{way} / {other}"] for other in (best, PLAIN))
            is_steady = (
                over_best["median"] >= STATIONARY_OVER_BEST_FIXED
                and over_plain["median"] >= MIN_PAIRED_MEDIAN
                and over_plain["lowest"] >= MIN_PAIRED_ROUND
            )
            figures = over_best["median"], over_plain["median"], over_plain["lowest"]
            rows.append(
                [
                    f"{row['load'][0]} {row['load'][1]}",
                    way,
                    f"{_median(row, way):,.0f}",
                    f"{_median(row, best):,.0f} ({best})",
                    *(f"{figure:.3f}" for figure in figures),
                    f"{_median(row, way, 'switches_per_s'):.2f}",
                    "yes" if is_steady else "**no**",
                ]
            )
    return (
        f"{table(head, rows)}\n"
        f"Asked: beside the best fixed number {STATIONARY_OVER_BEST_FIXED:.2f}, beside no drafts"
        f" {MIN_PAIRED_MEDIAN:.2f} and in no round below {MIN_PAIRED_ROUND:.2f}."
        f" Medians of the rounds; rounds: {result['rounds']}.\n"
    )


def adaptive_costs(result: Result) -> str:
    """Host time of a switch by batch size, and memory of graphs by configuration."""
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


def replay_shares(*results: Result) -> str:
    """Requests at once across; one row per drafter and replay: its share of the speed of replayed
    drafts, then one per way: milliseconds of a round, tokens per round, and of these the share that
    is left beside plain decoding."""
    shares: dict[str, dict[int, str]] = {}
    rounds: dict[str, dict[int, str]] = {}
    for result in results:
        for row in result["rows"]:
            load = row["load"][0]
            for pair, ratio in row["ratios"].items():
                mine, other = pair.split(" / ")
                if other != PLAIN:
                    name = f"{_drafter(result, mine)} / {other}"
                    shares.setdefault(name, {})[load] = f"{ratio['mean']:.3f}"
            for way in row["ways"]:
                told = rounds.setdefault(f"{_drafter(result, way)}, per round", {})
                told.setdefault(load, _round(row, way))
    loads = sorted({load for each in shares.values() for load in each})
    rows = [
        [name, *(each.get(load, "-") for load in loads)] for name, each in (shares | rounds).items()
    ]
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
