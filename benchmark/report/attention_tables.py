"""The tables that `benchmark.measure.attention` prints."""

from __future__ import annotations

from typing import Any

from benchmark.report.markdown import Result, table

WAYS = {  # heads of the columns, by the names in the result
    "ours": "ours, gathering included",
    "ours, attention": "ours, gathered before",
    "cudnn": "cuDNN, gathered before",
    "flashinfer": "FlashInfer, gathered before",
    "triton": "Triton, paged",
}
NONE = "Nothing was measured of this.\n"


def attention_prompts(results: list[Result]) -> str:
    """Shapes and kinds of load down, ways across: milliseconds of a layer and TFLOP/s."""
    result = results[0]
    if not result["prompts"]:
        return NONE
    lines = []
    for row in result["prompts"]:
        ways = row["ways"]
        for kind in ("burst", "sustained"):
            cells = [_speed(ways[name], kind) for name in WAYS]
            gathering = _ms(ways["ours, gathering"], f"{kind}_ms")
            first = _ms(ways["cudnn"], "first_ms", ".0f") if kind == "burst" else ""
            shape = f"{row['rows']:,} over {row['prefix']:,}"
            lines.append([shape, kind, cells[0], gathering, *cells[1:], first])
    head = ["rows over prefix", "load", WAYS["ours"], "gathering", *list(WAYS.values())[1:]]
    reasons = dict.fromkeys(
        f"{WAYS.get(name, name)}: {way['not_here']}.\n"
        for row in result["prompts"]
        for name, way in row["ways"].items()
        if "not_here" in way
    )
    text = f"ms of a layer (TFLOP/s); {_heads(result)}:\n\n"
    text += table([*head, "cuDNN's first call, ms"], lines)
    return text + ("\n" + "\n".join(reasons) if reasons else "")


def _speed(way: dict[str, Any], kind: str) -> str:
    if "not_here" in way:
        return _ms(way, "")
    return f"{way[f'{kind}_ms']:.3f} ({way[f'{kind}_tflop_s']:,.0f})"


def _ms(way: dict[str, Any], key: str, form: str = ".3f") -> str:
    if "not_here" in way:
        return "not installed" if way["not_here"] == "not installed" else "-"
    return format(way[key], form)


def attention_decodes(results: list[Result]) -> str:
    """Shapes down: microseconds of a layer, the floor, and what is planned; with a sweep, the best
    of it."""
    result = results[0]
    if not result["decodes"]:
        return NONE
    is_swept = "variants" in result["decodes"][0]
    lines = []
    for row in result["decodes"]:
        cells = [f"{row['requests']:,} x {row['kv_len']:,}", f"{row['planned_us']:.1f}"]
        cells += [f"{row['floor_us']:.1f}", row["tiles_and_splits"]]
        if is_swept:
            best = row["variants"][0]
            cells += [f"{best['us']:.1f}", best["name"]]
        lines.append(cells)
    head = ["requests x KV", "µs", "floor, µs", "planned"]
    head += ["best of sweep, µs", "by"] if is_swept else []
    copy = f"floor: K and V at {result['copy_gb_s']:,.0f} GB/s, as of a large copy"
    return f"A layer of a decode step; {copy}; {_heads(result)}:\n\n{table(head, lines)}"


def _heads(result: Result) -> str:
    heads = result["heads"]
    counts = f"{heads['num_heads']}/{heads['num_kv_heads']} heads of {heads['head_dim']}"
    return f"{counts}, {result['dtype']}"
