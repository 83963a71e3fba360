"""The tables of docs/performance.md, each made from one kind of stored result."""

from __future__ import annotations

from typing import Any

from benchmark.goals import (
    DECODE_MS,
    EAGLE_LOAD_TOK_S,
    EAGLE_ROUND_MS,
    HOST_MS,
    STARTUP_BACKENDS,
    STARTUP_S,
    THROUGHPUT_TOK_S,
)
from benchmark.report.markdown import Result, table, verdict


def decode_steps(results: list[Result]) -> str:
    """Batch sizes down, results across; the best one is judged."""
    labels = [_label(result) for result in results]
    by_batch = [{row["batch"]: row["ms"] for row in result["rows"]} for result in results]
    rows = []
    for batch in sorted(set().union(*by_batch)):
        found = [column.get(batch) for column in by_batch]
        cells = ["-" if value is None else f"{value:.2f}" for value in found]
        goal = DECODE_MS.get(batch)
        best = min(value for value in found if value is not None)
        asked = ["-", "-", "-"]
        if goal:
            reached = verdict(best, goal.asked, is_least=False)
            asked = [f"{goal.asked:.2f}", f"{goal.peer:.2f}", reached]
        rows.append([str(batch), *cells, *asked])
    heads = [f"{label}, ms/step" for label in labels]
    return table(["batch", *heads, "asked", "peer", "reached"], rows)


def _label(result: Result) -> str:
    return f"{result['attention_backend']}{'' if result['cuda_graphs'] else ', no graphs'}"


def rows_by_kind(columns: list[Result], unit_us: float, form: str) -> list[list[str]]:
    """Kinds of kernels down, profiles across; the kind that takes most comes first."""
    kinds = sorted(
        {kind for column in columns for kind in column["kinds_us"]},
        key=lambda kind: (-sum(column["kinds_us"].get(kind, 0.0) for column in columns), kind),
    )
    return [
        [kind, *(format(column["kinds_us"].get(kind, 0) / unit_us, form) for column in columns)]
        for kind in kinds
    ]


def step_profile(results: list[Result]) -> str:
    """Kinds of kernels down, batch sizes across, in microseconds."""
    batches = results[0]["rows"]
    rows = rows_by_kind(batches, 1.0, ",.0f")
    totals = {
        "gaps between kernels": "idle_us",
        "**profiled step**": "profiled_us",
        "wall time of a step, not profiled": "wall_us",
        "host time to launch a step": "host_us",
        "kernels": "kernels_per_step",
    }
    rows += [[name, *(f"{row[key]:,.0f}" for row in batches)] for name, key in totals.items()]
    text = table(["µs per step", *(row["load"] for row in batches)], rows)
    for row in batches:
        if asked_ms := HOST_MS.get(row["batch"]):
            reached = verdict(row["host_us"] / 1e3, asked_ms, is_least=False)
            text += f"\nHost time at batch {row['batch']}, asked: {asked_ms:g} ms or less; reached:"
            text += f" {reached}.\n"
    return text


def layer_ops(results: list[Result]) -> str:
    """Operations down, rows across: microseconds, and torch's over ours."""
    rows = results[0]["rows"]
    counts = sorted({row["rows"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        shown = f"{row['ours_us']:.1f} ({row['ratio']:.1f}x)"
        if row["kernel"] == "cublas":
            shown = f"{row['ours_us']:.1f} (cuBLAS)"
        cells.setdefault((row["op"], row["detail"]), {})[row["rows"]] = shown
    lines = [
        [f"{op}, {detail}", *(found.get(count, "-") for count in counts)]
        for (op, detail), found in cells.items()
    ]
    return table(["µs", *(f"{count} rows" for count in counts)], lines)


def throughput(results: list[Result]) -> str:
    """One row per result."""
    rows = []
    for result in results:
        shape = f"{result['num_prompts']} x ({result['input_len']} in, {result['output_len']} out)"
        judged = ["-", "-", "-"]
        if "asked" in result:
            asked, peer = THROUGHPUT_TOK_S
            reached = verdict(result["output_tok_s"], asked, is_least=True)
            judged = [f"{asked:,.0f}", f"{peer:,.0f}", reached]
        running, speed = str(result["max_running_requests"]), f"{result['output_tok_s']:,.0f}"
        chunk = str(result["chunked_prefill_size"])
        name, share = f"{_label(result)}, {result['how']}", f"{result['prefill_share']:.0%}"
        rows.append([name, shape, running, chunk, speed, share, *judged])
    head = [
        "",
        "prompts",
        "running",
        "chunk",
        "output tokens/s",
        "prefill",
        "asked",
        "peer",
        "reached",
    ]
    return table(head, rows)


def startup(results: list[Result]) -> str:
    """One row per attention backend and drafter; what compiles with nvcc is not judged. Compiling
    is what a cold start takes longer."""
    rows = []
    for line in (line for result in results for line in result["summary"]):
        backend = line["attention_backend"]
        drafter = line.get("drafter")
        cells = [backend if drafter is None else f"{backend}, with a head ({drafter})"]
        for run, asked in STARTUP_S.items():
            value = line[f"{run}_s"]
            if value is None:
                cells += ["failed", "-"]
            else:
                is_judged = backend in STARTUP_BACKENDS and drafter is None
                reached = verdict(value, asked, is_least=False) if is_judged else "-"
                cells += [f"{value:.1f}", reached]
        compile_s = line["compile_s"]
        rows.append([*cells, "-" if compile_s is None else f"{compile_s:.1f}"])
    head = ["s to the first answer"]
    for run, asked in STARTUP_S.items():
        head += [run, f"{asked:g} or less"]
    return table([*head, "compiling"], rows)


def mtp_gpu(results: list[Result]) -> str:
    """Kinds down, requests at once across: tokens per second and beside plain decoding."""
    rows = sorted(results[0].get("rows", []), key=lambda row: int(row["requests"]))
    if not rows:
        return "No number of requests was measured: --concurrency was empty.\n"
    lines = []
    for kind in rows[0]["kinds"]:
        cells = [row["kinds"][kind] for row in rows]
        shown = [f"{cell['tok_s']:,.0f} ({cell['ratio_to_plain']:.2f}x)" for cell in cells]
        lines.append([kind, *shown, f"{cells[0]['tokens_per_step']:.2f}"])
    loads = [f"{row['requests']} at once" for row in rows]
    prompts, result = results[0]["prompts"], results[0]
    packages = f"{len(prompts['packages'])} held-out packages"
    note = f" ({prompts['note']})" if prompts["note"] else ""
    return (
        table(["tokens/s", *loads, "tokens/step"], lines)
        + f"\nModel: {result['model']}; {result['prompt_tokens']} tokens of {packages}{note} in,"
        f" {result['new_tokens']} out; medians of {result['rounds']} rounds.\n"
    )


def mtp_checks(results: list[Result]) -> str:
    """What is asked, one line each; the result of --static-graph-check may be a file of its own."""
    rows = [
        [
            check["what"],
            str(check["requests"]),
            f"{check['value']:.3f}",
            f"{check['asked']:.2f}",
            "yes" if check["passed"] else "**no**",
        ]
        for result in results
        for check in result.get("checks", [])
    ]
    return table(["ratio", "requests at once", "measured", "asked, at least", "reached"], rows)


def mtp_paired(results: list[Result]) -> str:
    """Load-aware kinds beside plain requests, round by round."""
    rows = [
        [
            str(row["requests"]),
            kind,
            f"{found['median']:.3f}",
            f"{found['lowest']:.3f}",
            str(len(found["ratios"])),
            f"{found['tokens_per_step']:.2f}",
            "yes" if found["passed"] else "**no**",
        ]
        for result in results
        for row in result["rows"]
        for kind, found in row["kinds"].items()
    ]
    asked = results[0]["asked"]
    head = ["requests at once", "kind", f"median ({asked['median']} or more)"]
    head += [f"lowest ({asked['lowest']} or more)", "rounds", "tokens/step", "reached"]
    return table(head, rows)


def return_costs(results: list[Result]) -> str:
    """Step times of what requests may ask for."""
    rows = []
    for row in results[0]["rows"]:
        asked, ratio = row.get("asked"), row.get("ratio")
        compared = "" if ratio is None else f"{ratio:.3f} of {row['beside']}"
        judged = "" if asked is None else f"{asked:.2f}: {verdict(ratio, asked, is_least=False)}"
        rows.append([str(row["batch"]), row["kind"], f"{row['ms']:.2f}", compared, judged])
    text = table(["batch", "every request", "ms/step", "median ratio", "asked, at most"], rows)
    slots, idle_ms = results[0]["kv_slots"], results[0]["idle_scrape_ms"]
    return f"{text}\n{slots:,} KV slots; one scrape of an idle server takes {idle_ms:.1f} ms.\n"


def eagle_rounds(results: list[Result]) -> str:
    """Rounds of EAGLE beside steps of plain decoding."""
    rows = []
    for result in results:
        for row in result["rows"]:
            goal = EAGLE_ROUND_MS[row["batch"]]
            per_token = row["round_ms"] / result["accept_length"]
            rows.append(
                [
                    str(row["batch"]),
                    f"{row['plain_ms']:.2f}",
                    f"{row['round_ms']:.2f}",
                    f"{goal.asked:.1f}",
                    f"{goal.peer:.2f}",
                    verdict(row["round_ms"], goal.asked, is_least=False),
                    f"{row['plain_ms'] / per_token:.2f}",
                ]
            )
        speeds = {run["kind"]: run["load_tok_s"] for run in result["runs"]}
        goal, plain, drafted = EAGLE_LOAD_TOK_S, speeds["plain"], speeds["EAGLE"]
        rows.append(
            [
                "512 x (512 in, 128 out), tokens/s",
                f"{plain:,.0f}",
                f"{drafted:,.0f}",
                f"{goal.asked:,.0f}",
                f"{goal.peer:,.0f}",
                verdict(drafted, goal.asked, is_least=True),
                f"{drafted / plain:.2f}",
            ]
        )
    head = ["requests", "plain step, ms", "round, ms", "asked", "peer", "reached", "speed-up"]
    return table(head, rows)


def before_after(results: list[Result]) -> str:
    """Two commits in turn on one machine; pairs of commits below each other."""
    rows, batches = [], [1, 8, 64, 128]
    for result in results:
        for is_before in (True, False):
            mine = [run for run in result["runs"] if _is_before(run, result) == is_before]
            decodes = [run["rows"] for run in mine if run["what"] == "decode"]
            assert all([row["batch"] for row in run] == batches for run in decodes)
            cells = [
                " / ".join(f"{run[place]['ms']:.2f}" for run in decodes)
                for place in range(len(batches))
            ]
            speeds = [run["output_tok_s_by_run"] for run in mine if run["what"] == "throughput"]
            loads = " / ".join(f"{speed:,.0f}" for run in speeds for speed in run)
            starts = [
                f"{row['seconds']:.1f}"
                for row in result.get("starts_with_mask_token", {"rows": []})["rows"]
                if _is_before(row, result) == is_before
            ]
            rows.append([mine[0]["commit"][:12], *cells, loads or "-", " / ".join(starts) or "-"])
    head = ["commit", *(f"{batch}, ms/step" for batch in batches)]
    return table([*head, "full load, tokens/s", "start with a mask token, s"], rows)


def _is_before(run: dict[str, Any], result: Result) -> bool:
    return bool(run["commit"] == result["before"])
