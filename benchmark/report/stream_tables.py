"""The table of streams over HTTP with other bounds of a step."""

from __future__ import annotations

from benchmark.goals import HEADLINE
from benchmark.report.markdown import Result, table

FIGURES = {  # by what is shown: part and key of a result
    "output tokens/s": ("at_once", "tok_s"),
    "first token p50, ms": ("at_once", "first_token_p50_ms"),
    "gap p99, ms": ("at_once", "gap_p99_ms"),
    "one at a time: first token p50, ms": ("alone", "first_token_p50_ms"),
}
ASKED = dict(zip(FIGURES, ("HTTP, output", "HTTP, first token p50", "HTTP, gap p99")))


def http_streams(results: list[Result]) -> str:
    """Figures down, results across, and what is asked of the default."""
    rows = []
    for name, (part, key) in FIGURES.items():
        asked = f"{HEADLINE[ASKED[name]].asked:,g}" if name in ASKED else "-"
        cells = [_number(result[part][key]) for result in results]
        rows.append([name, *cells, asked])
    first = results[0]
    shape = f"{first['clients']} at once, {first['input_len']} in, {first['output_len']} out"
    return table([shape, *(_flags(result) for result in results), "asked"], rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _flags(result: Result) -> str:
    """Gives the flags of the server; without any it is called default."""
    flags = [f"--{name.replace('_', '-')} {value:g}" for name, value in result["flags"].items()]
    return ", ".join(flags) or "default flags"
