"""Writes the measured parts of docs/performance.md from benchmark/results/.

A part NAME stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; the page holds those that
it wants, in any order. The parts, and the results that each is made of:

    decode_steps   decode_steps*.json    milliseconds per decode step, asked and reached
    step_profile   step_profile.json     where those milliseconds go, by kind of kernel
    layer_ops      layer_ops.json        fused operations beside torch's own way
    throughput     throughput*.json      output tokens per second under full load
    startup        startup*.json         process start to the first answer
    mtp_gpu        mtp_gpu.json          multi-token prediction, by requests at once
    mtp_checks     mtp_gpu*.json         what is asked of it, and what was reached
    mtp_paired     mtp_paired*.json      it heeds the load: beside plain decoding, round by round
    return_costs   return_costs.json     what log-probabilities, penalties and scrapes cost
    before_after   before_after.json     steps and full load of two commits, run in turn

NAME*.json: one column or row per file, so decode_steps_flashinfer.json stands beside
decode_steps.json. A part without results says so. `--check` changes nothing and exits with 1 if
the page does not hold what the results say; without a page there is nothing to check.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goals import DECODE_MS, HOST_MS, STARTUP_BACKENDS, STARTUP_S, THROUGHPUT_TOK_S

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmark" / "results"
Result = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def provenance(result: Result) -> str:
    """Where a figure is from: one line below a table."""
    machine, versions = result["machine"], result["versions"]
    commit = result["commit"][:12] + (" with local changes" if result.get("dirty") else "")
    where: str = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    what = f"torch {versions['torch']}"
    what += f", CUDA {versions['cuda']}" if "cuda" in versions else ""
    return f"{where}, {what}; commit {commit}; `{result['command']}`.\n"


def _with_provenance(text: str, results: list[Result]) -> str:
    return text + "\n" + "\n".join(provenance(result) for result in results)


def _verdict(reached: float, asked: float, is_least: bool) -> str:
    good = reached >= asked if is_least else reached <= asked
    return "yes" if good else "**no**"


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
            verdict = _verdict(best, goal.asked, is_least=False)
            asked = [f"{goal.asked:.2f}", f"{goal.peer:.2f}", verdict]
        rows.append([str(batch), *cells, *asked])
    heads = [f"{label}, ms/step" for label in labels]
    return table(["batch", *heads, "asked", "peer", "reached"], rows)


def _label(result: Result) -> str:
    return f"{result['attention_backend']}{'' if result['cuda_graphs'] else ', no graphs'}"


def step_profile(results: list[Result]) -> str:
    """Kinds of kernels down, batch sizes across, in microseconds."""
    batches = results[0]["rows"]
    kinds = sorted(
        {kind for row in batches for kind in row["kinds_us"]},
        key=lambda kind: (-sum(row["kinds_us"].get(kind, 0.0) for row in batches), kind),
    )
    rows = [[kind, *(f"{row['kinds_us'].get(kind, 0):,.0f}" for row in batches)] for kind in kinds]
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
            verdict = _verdict(row["host_us"] / 1e3, asked_ms, is_least=False)
            text += f"\nHost time at batch {row['batch']}, asked: {asked_ms:g} ms or less; reached:"
            text += f" {verdict}.\n"
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
            verdict = _verdict(result["output_tok_s"], asked, is_least=True)
            judged = [f"{asked:,.0f}", f"{peer:,.0f}", verdict]
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
    """One row per attention backend; what compiles with nvcc is not judged. Compiling is what a
    cold start takes longer."""
    rows = []
    for line in (line for result in results for line in result["summary"]):
        backend = line["attention_backend"]
        cells = [backend]
        for run, asked in STARTUP_S.items():
            value = line[f"{run}_s"]
            if value is None:
                cells += ["failed", "-"]
            else:
                is_judged = backend in STARTUP_BACKENDS
                verdict = _verdict(value, asked, is_least=False) if is_judged else "-"
                cells += [f"{value:.1f}", verdict]
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
        verdict = "" if asked is None else f"{asked:.2f}: {_verdict(ratio, asked, is_least=False)}"
        rows.append([str(row["batch"]), row["kind"], f"{row['ms']:.2f}", compared, verdict])
    text = table(["batch", "every request", "ms/step", "median ratio", "asked, at most"], rows)
    slots, idle_ms = results[0]["kv_slots"], results[0]["idle_scrape_ms"]
    return f"{text}\n{slots:,} KV slots; one scrape of an idle server takes {idle_ms:.1f} ms.\n"


def before_after(results: list[Result]) -> str:
    """Two commits in turn on one machine."""
    result = results[0]
    before = result["before"]
    decodes = [run for run in result["runs"] if run["what"] == "decode"]
    loads = [run for run in result["runs"] if run["what"] == "throughput"]
    batches = [row["batch"] for row in decodes[0]["rows"]]
    rows = []
    for is_before in (True, False):
        mine = [run for run in decodes if (run["commit"] == before) == is_before]
        cells = [
            " / ".join(f"{run['rows'][place]['ms']:.2f}" for run in mine)
            for place in range(len(batches))
        ]
        speeds = [run for run in loads if (run["commit"] == before) == is_before]
        each = " / ".join(f"{speed:,.0f}" for run in speeds for speed in run["output_tok_s_by_run"])
        rows.append([f"{mine[0]['commit'][:12]}", *cells, each])
    return table(["commit", *(f"{b}, ms/step" for b in batches), "full load, tokens/s"], rows)


PARTS: dict[str, tuple[str, Callable[[list[Result]], str]]] = {
    "decode_steps": ("decode_steps*.json", decode_steps),
    "step_profile": ("step_profile.json", step_profile),
    "layer_ops": ("layer_ops.json", layer_ops),
    "throughput": ("throughput*.json", throughput),
    "startup": ("startup*.json", startup),
    "mtp_gpu": ("mtp_gpu.json", mtp_gpu),
    "mtp_checks": ("mtp_gpu*.json", mtp_checks),
    "mtp_paired": ("mtp_paired*.json", mtp_paired),
    "return_costs": ("return_costs.json", return_costs),
    "before_after": ("before_after.json", before_after),
}


def part(name: str, results: Path) -> str:
    """The text of a part."""
    pattern, make = PARTS[name]
    files = sorted(results.glob(pattern))
    if not files:
        return f"Not measured yet: there is no `benchmark/results/{pattern}`.\n"
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return _with_provenance(make(found), found)


def fill(page: str, results: Path) -> tuple[str, list[str]]:
    """The page with the parts that it has marks for, and their names.

    Raises:
        ValueError: if a mark lacks its other half, or they are in the wrong order.
    """
    filled = []
    for name in PARTS:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in page and end not in page:
            continue
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"The page must hold {begin} and, after it, {end}.")
        page = f"{head}{begin}\n{part(name, results)}{end}{tail}"
        filled.append(name)
    return page, filled


def main(argv: list[str] | None = None) -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    page: Path = arguments.page
    if not page.is_file():
        print(f"There is no {page.name} yet, so there is nothing to fill.")
        return 0
    old = page.read_text(encoding="utf-8")
    new, filled = fill(old, arguments.results)
    for name in filled:
        if not list(arguments.results.glob(PARTS[name][0])):
            print(f"{name}: there is no {PARTS[name][0]} in {arguments.results.name}/ yet.")
    if absent := [name for name in PARTS if name not in filled]:
        print(f"{page.name} has no marks for {', '.join(absent)}.")
    if not arguments.check:
        page.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{page.name} is out of date: python benchmark/make_gpu_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
