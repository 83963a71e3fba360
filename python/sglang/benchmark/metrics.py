"""Figures of a serving benchmark, under SGLang's names."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestResult:
    """One request as its client saw it; times in seconds.

    Attributes:
        itl: between one piece of output and the next.
        error: why it failed; empty when it did not.
    """

    prompt_len: int = 0
    output_len: int = 0
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values; 0 without any."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(results: Sequence[RequestResult], duration_s: float) -> dict[str, Any]:
    """The figures of one run; latencies in milliseconds."""
    done = [result for result in results if not result.error]
    num_input = sum(result.prompt_len for result in done)
    num_output = sum(result.output_len for result in done)
    tpot = [(r.latency - r.ttft) / (r.output_len - 1) for r in done if r.output_len > 1]
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "input_throughput": num_input / duration_s,
        "output_throughput": num_output / duration_s,
        "total_throughput": (num_input + num_output) / duration_s,
        "concurrency": sum(result.latency for result in done) / duration_s,
    }
    for name, values in (
        ("e2e_latency", [result.latency for result in done]),
        ("ttft", [result.ttft for result in done]),
        ("tpot", tpot),
        ("itl", [gap for result in done for gap in result.itl]),
    ):
        in_ms = [1000 * value for value in values]
        summary[f"mean_{name}_ms"] = statistics.fmean(in_ms) if in_ms else 0.0
        summary[f"median_{name}_ms"] = percentile(in_ms, 0.5)
        summary[f"std_{name}_ms"] = statistics.pstdev(in_ms) if in_ms else 0.0
        for share in (90, 95, 99):
            summary[f"p{share}_{name}_ms"] = percentile(in_ms, share / 100)
        summary[f"max_{name}_ms"] = max(in_ms, default=0.0)
    return summary


HEAD_ROWS = (
    ("Successful requests:", "completed", "{:<40} {:<10}"),
    ("Benchmark duration (s):", "duration", "{:<40} {:<10.2f}"),
    ("Total input tokens:", "total_input_tokens", "{:<40} {:<10}"),
    ("Total generated tokens:", "total_output_tokens", "{:<40} {:<10}"),
    ("Request throughput (req/s):", "request_throughput", "{:<40} {:<10.2f}"),
    ("Input token throughput (tok/s):", "input_throughput", "{:<40} {:<10.2f}"),
    ("Output token throughput (tok/s):", "output_throughput", "{:<40} {:<10.2f}"),
    ("Total token throughput (tok/s):", "total_throughput", "{:<40} {:<10.2f}"),
    ("Concurrency:", "concurrency", "{:<40} {:<10.2f}"),
)
SECTIONS = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency", ("mean", "median", "p90", "p99")),
    ("Time to First Token", "TTFT", "ttft", ("mean", "median", "p99")),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot", ("mean", "median", "p99")),
    ("Inter-Token Latency", "ITL", "itl", ("mean", "median", "p95", "p99", "max")),
)


def report_rows(summary: dict[str, Any]) -> list[str]:
    """Returns the lines to print, in SGLang's format, which scripts search."""
    rows = [form.format(label, summary[key]) for label, key, form in HEAD_ROWS]
    if summary.get("accept_length") is not None:
        rows.append("{:<40} {:<10.2f}".format("Accept length:", summary["accept_length"]))
    for title, label, key, kinds in SECTIONS:
        rows.append(f"{title:-^50}")
        for kind in kinds:
            name = kind.capitalize() + f" {label} (ms):"
            rows.append("{:<40} {:<10.2f}".format(name, summary[f"{kind}_{key}_ms"]))
    return rows
