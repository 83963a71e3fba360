"""Tables of `benchmark.measure.stream_bounds`: streams and lists under several bounds of a step."""

from __future__ import annotations

import statistics

from benchmark.report.markdown import Result, table

BOUND_FIGURES = {  # of a result of stream_bounds, with the form of a number
    "output tokens/s": ("tok_s", ",.0f"),
    "first token p50, ms": ("first_token_p50_ms", ".0f"),
    "gap p50, ms": ("gap_p50_ms", ".1f"),
    "gap p99, ms": ("gap_p99_ms", ".1f"),
}
LIST_TIMES = {"alone": "alone_s", "without any bound": "unbounded_s", "beside one": "beside_s"}


def streams_by_bound(result: Result) -> str:
    """One row per way to bound steps: medians of the rounds, and their least and most."""
    rows = []
    for row in result["streams"]:
        cells = []
        for key, form in BOUND_FIGURES.values():
            values = [run[key] for run in row["runs"]]
            cells.append(f"{row[key]:{form}} ({min(values):{form}} to {max(values):{form}})")
        rows.append([_way(row["way"]), *cells])
    return table([_streams(result), *BOUND_FIGURES], rows)


def _way(name: str) -> str:
    """A way of `benchmark.measure.stream_bounds` in words."""
    kind, _, number = name.rpartition(" ")
    words = {
        "": f"steps of {number} ms",
        "together": f"steps of {number} ms, all prompts that fit at once",
        "chunks": f"{number} prompt tokens in each step",
    }
    return words[kind]


def _streams(result: Result) -> str:
    return f"{result['clients']} streams, {result['input_len']} in, {result['output_len']} out"


def lists_beside(result: Result) -> str:
    """Lists down: seconds by the default, without a bound, and beside one stream."""
    rows = [
        [
            row["name"],
            *(f"{statistics.median(row[key]):.2f}" for key in LIST_TIMES.values()),
            f"{statistics.median(row['beside_over_alone']):.3f}",
        ]
        for row in result["lists"]
    ]
    return table(["list, s", *LIST_TIMES, "of alone"], rows)
