"""Tables of speculation beside plain decoding, and of ways to choose how many drafts there are."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    ADAPTIVE_OVER_FIXED_3,
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    MIN_SPEED_UP_OF_ACCEPT_LENGTH,
    MIN_STANDALONE_SPEED_UP,
    NGRAM_HOST_US,
    NGRAM_REPEATS_SPEED_UP,
    PROFILING_FROM_CACHE_S,
    PROFILING_S,
    STATIONARY_OVER_BEST_FIXED,
    SWITCH_US,
    SWITCHES_PER_S,
    TIERS_MEMORY_RATIO,
    TREE_OVER_CHAIN,
    is_steady,
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


def tile_spec(results: list[Result]) -> str:
    """Ways down, requests at once across: tokens per second and, with TileSpec, beside the best
    fixed number of drafts."""
    lines = []
    for result in results:
        rows = result["rows"]
        lines.append(_speeds_of_ways(rows, _beside_static))
        best = ", ".join(f"{row['requests']}: {row['best_static']}" for row in rows)
        lines.append(f"In brackets: beside the best fixed number of drafts ({best}).\n")
        segments = result["row_times"].get("segments", [])
        ends = ", ".join(str(last) for _, last in segments[:-1])
        if ends:
            lines.append(f"Steps take 15 % longer or more behind so many rows: {ends}.\n")
        lines += _profiling(result) + _calibration(result)
    return "\n".join(lines)


def swept_rows(results: list[Result]) -> str:
    """Ways down, requests at once across: tokens per second, drafts that are verified on average,
    and TileSpec beside the best of the others."""
    return "\n".join(_speeds_of_ways(result["rows"], _beside_swept) for result in results)


def _speeds_of_ways(rows: list[Result], more_of: Callable[[Result, str], str]) -> str:
    """Ways down, requests at once across: the median speed, and what else there is to say."""
    figures = [
        [way, *(f"{statistics.median(row['tok_s'][way]):,.0f}{more_of(row, way)}" for row in rows)]
        for way in rows[0]["tok_s"]
    ]
    return table(["tokens/s", *(f"{row['requests']} at once" for row in rows)], figures)


def _beside_static(row: Result, way: str) -> str:
    beside = row["tile_spec"].get(way, {}).get("over_best_static")
    return "" if beside is None else f" ({beside:.3f})"


def _beside_swept(row: Result, way: str) -> str:
    verified = statistics.median(row["verified_drafts"][way])
    beside = row["tile_spec"].get(way, {}).get("over_best_swept")
    return f" ({verified:.1f})" if beside is None else f" ({verified:.1f}, **{beside:.3f}**)"


def tree_shapes(results: list[Result]) -> str:
    """A row for each number of requests and shape, and the best tree beside the best chain."""
    head = ["requests at once", "shape", "tokens/s", "beside no drafts", "tokens per step"]
    tables = []
    for result in results:
        rows, lines = [], []
        for load in result["rows"]:
            for shape, found in load["shapes"].items():
                speed = f"{statistics.median(found['tok_s']):,.0f}"
                speed_up, length = f"{found['speed_up']:.3f}", f"{found['accept_length']:.2f}"
                rows.append([str(load["requests"]), shape, speed, speed_up, length])
            reached = verdict(load["tree_over_chain"], TREE_OVER_CHAIN, is_least=True)
            asked = f" (asked: {TREE_OVER_CHAIN:g}, {reached})" if load["requests"] == 1 else ""
            lines.append(
                f"{load['requests']} at once: the best tree, {load['best_tree']}, is"
                f" {load['tree_over_chain']:.3f} times the best chain, {load['best_chain']}{asked}."
            )
        measured = f"Commit {result['commit'][:12]}, {result['rounds']} rounds in turn:"
        tables.append("\n".join([f"{measured}\n", table(head, rows), "\n\n".join(lines), ""]))
    return "\n".join(tables)


def _profiling(result: Result) -> list[str]:
    """What prices take at the start, where that was measured."""
    seconds = result.get("profiling_s")
    if not seconds:
        return []
    measured, kept = seconds["measured"], seconds["from_cache"]
    return [
        f"Prices took {measured:.1f} s to measure (asked: less than {PROFILING_S:g}), and take"
        f" {kept:.3f} s from the kept file (asked: less than {PROFILING_FROM_CACHE_S:g}).\n"
    ]


def _calibration(result: Result) -> list[str]:
    """How far chances are from what was confirmed, where that was measured."""
    found = result.get("calibration")
    if not found:
        return []
    return [
        f"Over {found['num_drafts']:,} drafts, chances differ from the share confirmed by"
        f" {found['mean_error']:.3f} on average, scores themselves by"
        f" {found['mean_error_of_scores']:.3f}.\n"
    ]


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


def standalone_paired(results: list[Result]) -> str:
    """A draft model beside no drafts: one row per number of requests."""
    rows = [
        [
            str(row["requests"]),
            f"{statistics.median(row['plain_tok_s']):,.0f}",
            f"{statistics.median(row['drafted_tok_s']):,.0f}",
            f"{row['median']:.2f}",
            f"{row['accept_length']:.2f}",
            *_asked(MIN_STANDALONE_SPEED_UP.get(row["requests"]), row["median"]),
        ]
        for result in results
        for row in result["rows"]
    ]
    head = ["requests at once", "no drafts, tokens/s", "draft model", "speed-up"]
    return table([*head, "tokens per step with drafts", "asked", "reached"], rows) + "\n"


def _asked(asked: float | None, reached: float) -> list[str]:
    """The least that was asked, if anything was, and whether it was reached."""
    return ["-", "-"] if asked is None else [f"{asked:.2f}", verdict(reached, asked, is_least=True)]


def ngram_rounds(results: list[Result]) -> str:
    """NGRAM beside no drafts: one row per kind of text and number of requests."""
    lines = []
    for result in results:
        rows = []
        for row in result["rows"]:
            repeats_alone = row["work"] == "repeats" and row["requests"] == 1
            goal = _asked(NGRAM_REPEATS_SPEED_UP if repeats_alone else None, row["median"])
            if row["work"] == "novel":
                is_safe = row["median"] >= MIN_PAIRED_MEDIAN and row["lowest"] >= MIN_PAIRED_ROUND
                asked = f"{MIN_PAIRED_MEDIAN:g}, lowest round {MIN_PAIRED_ROUND:g}"
                goal = [asked, "yes" if is_safe else "**no**"]
            figures = [f"{row['median']:.3f}", f"{row['lowest']:.3f}"]
            rows.append([row["work"], str(row["requests"]), *figures, *goal])
        head = ["text", "requests at once", "speed-up", "lowest round", "asked", "reached"]
        host = result["host"]
        lines += [
            table(head, rows),
            f"A step of {host['batch']} requests takes {host['ngram_us']:.0f} us of the host, and"
            f" {host['plain_us']:.0f} us without drafts (asked of what NGRAM adds: less than"
            f" {NGRAM_HOST_US:g}). {result['rounds']} rounds in turn.\n",
        ]
    return "\n".join(lines)


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
