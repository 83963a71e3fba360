"""The tables of docs/performance.md on long prompts, streams beside them, and loading weights."""

from __future__ import annotations

from benchmark.goals import (
    GPU_OF_GOALS,
    HTTP_ALONE_FIRST_TOKEN_MS,
    HTTP_STREAMS,
    HTTP_STREAMS_SHAPE,
    LOAD_WEIGHTS_S,
    LONG_PROMPTS,
    LONG_PROMPTS_GEOMETRY,
    MAX_GAP_RATIO,
    MIN_KV_SHARE,
    LoadGoal,
)
from benchmark.report.markdown import Result, table, verdict
from benchmark.report.performance_tables import rows_by_kind

CPU_ROLES = {  # of a process or thread in a result of http_overhead, what it takes of a core
    "client": "clients",
    "front_end": "front end",
    "detokenizer": "detokenizer",
    "scheduler": "scheduler",
}
GOALS_OF = f"\nAsked and peer are for {GPU_OF_GOALS}.\n"


def long_prompts(results: list[Result]) -> str:
    """Loads down, results across; the first result is judged."""
    by_name = [{row["name"]: row for row in result["rows"]} for result in results]
    is_judged = _has_goals(results[0])
    rows = []
    for name in dict.fromkeys(name for column in by_name for name in column):
        found = [column.get(name) for column in by_name]
        row = next(row for row in found if row is not None)
        cells = ["-" if one is None else _figure(one["value"], row["unit"]) for one in found]
        goal = LONG_PROMPTS[name] if is_judged else None
        first = by_name[0].get(name)
        judged = _judged(goal, None if first is None else first["value"], row["unit"])
        rows.append([_load(row), row["unit"], *cells, *judged])
    heads = [_flags(result) for result in results]
    return table(["load", "unit", *heads, "asked", "peer", "reached"], rows) + GOALS_OF


def _has_goals(result: Result) -> bool:
    return (result["geometry"], result["divided_by"]) == (LONG_PROMPTS_GEOMETRY, 1)


def _load(row: Result) -> str:
    text = f"{row['num_prompts']:,} x ({row['input_len']:,} in, {row['output_len']:,} out)"
    if row["unit"] == "ms/step":
        text = f"decode, {row['num_prompts']} x {row['input_len']:,} in"
    return text + (f", {row['shared_len']:,} of them shared" if row["shared_len"] else "")


def _flags(result: Result) -> str:
    """Of the server; none is what it does by itself."""
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in result["flags"].items()]
    backend = result["attention_backend"]
    return ", ".join([*([] if backend == "default" else [backend]), *flags]) or "default flags"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if "tokens/s" in unit:
        return f"{value:,.0f}"
    return f"{value:.3f}" if unit == "s" and value < 2 else f"{value:.2f}"


def _judged(goal: LoadGoal | None, value: float | None, unit: str) -> list[str]:
    """The cells asked, peer and reached."""
    if goal is None:
        return ["-", "-", "-"]
    reached = "-" if value is None else verdict(value, goal.asked, "tokens/s" in unit)
    return [_figure(goal.asked, unit), _figure(goal.peer, unit), reached]


def prefill_profile(results: list[Result]) -> str:
    """Kinds of kernels down, prompts across, in milliseconds."""
    columns = results[0]["rows"]
    rows = rows_by_kind(columns, 1e3, ".1f")
    totals = {
        "gaps between kernels": "idle_us",
        "**profiled prefill**": "profiled_us",
        "wall time, not profiled": "wall_us",
    }
    rows += [
        [name, *(f"{column[key] / 1e3:.1f}" for column in columns)] for name, key in totals.items()
    ]
    for kind in dict.fromkeys(kind for column in columns for kind in column["tflop_s"]):
        speeds = [column["tflop_s"].get(kind) for column in columns]
        cells = ["-" if speed is None else f"{speed:,.0f}" for speed in speeds]
        rows.append([f"{kind}, TFLOP/s", *cells])
    counts = {"kernels": "kernels_per_step", "turns of the scheduler": "num_turns"}
    rows += [[name, *(f"{column[key]:,.0f}" for column in columns)] for name, key in counts.items()]
    return table(["ms per prompt", *(column["load"] for column in columns)], rows)


def step_gaps(results: list[Result]) -> str:
    """One row per value of --max-step-ms."""
    rows = []
    for result, row in ((one, row) for one in results for row in one["rows"]):
        alone, beside = row["alone"], row["beside"]
        times = [alone["p50_ms"], alone["p99_ms"]]
        times += [beside["p50_ms"], beside["p99_ms"], beside["max_ms"]]
        within = {True: "yes", False: "**no**", None: "-"}[row["is_within"]]
        seconds = [row["first_token_s"], row["first_token_s_on_idle"]]
        cells = [f"{ms:.1f}" for ms in times] + [f"{value:.2f}" for value in seconds]
        how = ", steps alone" if result["how"] == "in-process" else ""
        rows.append([_bound(row) + how, *cells, within])
    first = results[0]
    head = ["--max-step-ms", "gap alone, p50", "p99", "gap beside, p50", "p99", "max"]
    head += ["its first token, s", "on an idle server", f"max at most {MAX_GAP_RATIO:g} x"]
    what = f"{first['streams']} streams, alone and beside a prompt of {first['prompt_len']:,}"
    return f"{what} tokens; gaps in ms:\n\n{table(head, rows)}"


def _bound(row: Result) -> str:
    value, bound_ms = row["max_step_ms"], row["bound_ms"]
    return f"{value} ({bound_ms:g})" if value == "default" and bound_ms is not None else value


def http_streams(results: list[Result]) -> str:
    """Figures down, results across; the first result is judged."""
    figures = {
        "output tokens/s": ("at_once", "tok_s", HTTP_STREAMS["tok_s"]),
        "first token p50, ms": (
            "at_once",
            "first_token_p50_ms",
            HTTP_STREAMS["first_token_p50_ms"],
        ),
        "gap p99, ms": ("at_once", "gap_p99_ms", HTTP_STREAMS["gap_p99_ms"]),
        "one at a time: first token p50, ms": (
            *("alone", "first_token_p50_ms"),
            HTTP_ALONE_FIRST_TOKEN_MS,
        ),
    }
    first = results[0]
    is_judged = {name: first[name] for name in HTTP_STREAMS_SHAPE} == HTTP_STREAMS_SHAPE
    rows = []
    for name, (part, key, goal) in figures.items():
        values = [result[part][key] for result in results]
        cells = [_figure(value, name) for value in values]
        rows.append([name, *cells, *_judged(goal if is_judged else None, values[0], name)])
    shape = f"{first['clients']} at once, {first['input_len']} in, {first['output_len']} out"
    heads = [_flags(result) for result in results]
    return table([shape, *heads, "asked", "peer (Triton)", "reached"], rows) + GOALS_OF


def http_overhead(results: list[Result]) -> str:
    """Ways to the same streams down; those over HTTP are judged beside the Engine."""
    (result,), rows = results, []
    for row in result["rows"]:
        ratio = row.get("over_engine")
        shares = row["cpu_shares"]
        rows.append(
            [
                row["way"],
                f"{row['tok_s']:,.0f}",
                "-" if ratio is None else f"{ratio:.3f}",
                "-" if ratio is None else verdict(ratio, result["asked_over_engine"], True),
                *(f"{shares[role]:.0%}" if role in shares else "-" for role in CPU_ROLES),
            ]
        )
    asked = f"{result['asked_over_engine']:g} or more"
    head = [_streams(result), "tokens/s", "of the Engine's", asked, *CPU_ROLES.values()]
    return table(head, rows)


def _streams(result: Result) -> str:
    return f"{result['clients']} streams, {result['input_len']} in, {result['output_len']} out"


def load_weights(results: list[Result]) -> str:
    """One row per load format; the seconds of files are judged."""
    rows = []
    for result in results:
        size = f"{result['checkpoint_bytes'] / 1e9:.1f} GB of safetensors"
        for row in result["rows"]:
            is_file, share = row["load_format"] != "dummy", row.get("kv_share")
            is_judged = is_file and result["geometry"] == LONG_PROMPTS_GEOMETRY
            rows.append(
                [
                    size if is_file else "--load-format dummy",
                    f"{row['ready_s']:.1f}",
                    verdict(row["ready_s"], LOAD_WEIGHTS_S, is_least=False) if is_judged else "-",
                    f"{row['peak_mib']['VmHWM']:,}",
                    f"{row['peak_mib']['own']:,}",
                    f"{row['kv_tokens']:,}",
                    "-" if share is None else f"{share:.3f}",
                    "-" if share is None else verdict(share, MIN_KV_SHARE, is_least=True),
                ]
            )
    head = ["weights", "s to ready, warm", f"{LOAD_WEIGHTS_S:g} or less"]
    head += ["host memory, MiB", "without mapped files", "KV tokens", "of what fits"]
    return table([*head, f"{MIN_KV_SHARE:g} or more"], rows)
