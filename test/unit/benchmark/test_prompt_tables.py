"""The tables of long prompts, streams and loading are what results give, and judge by the goals."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmark import goals
from benchmark.measure.long_prompts import CASES
from benchmark.report import prompt_tables

GEOMETRY = goals.LONG_PROMPTS_GEOMETRY
SERVER: dict[str, Any] = {"attention_backend": "default", "flags": {}, "geometry": GEOMETRY}


def long_prompts(factor: float, **changes: Any) -> dict[str, Any]:
    """A result in which everything is so many times what is asked."""
    rows = [
        {**asdict(case), "value": factor * goals.LONG_PROMPTS[case.name].asked} for case in CASES
    ]
    return {**SERVER, "divided_by": 1, "rows": rows, **changes}


def verdicts(text: str) -> list[str]:
    return [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize(("factor", "time", "speed"), [(0.99, "yes", "no"), (1.01, "no", "yes")])
def test_times_are_to_be_short_and_speeds_high(factor: float, time: str, speed: str) -> None:
    found = verdicts(prompt_tables.long_prompts([long_prompts(factor)]))
    expected = [speed if "tokens/s" in case.unit else time for case in CASES]
    assert [verdict.strip("*") for verdict in found] == expected
    assert {verdict for verdict in found if "no" in verdict} == {"**no**"}


def test_a_load_stands_beside_what_is_asked_and_the_peer() -> None:
    text = prompt_tables.long_prompts([long_prompts(1.0)])
    for line in (
        "| load | unit | default flags | asked | peer | reached |",
        "| 1 x (4,096 in, 1 out) | s | 0.095 | 0.095 | 0.103 | yes |",
        "| 128 x (4,096 in, 64 out) | all tokens/s | 36,500 | 36,500 | 35,171 | yes |",
        "| 192 x (3,000 in, 400 out) | s | 28.00 | 28.00 | - | yes |",
        "| 256 x (4,160 in, 64 out), 4,096 of them shared | s | 2.40 | 2.40 | 2.95 | yes |",
        "| decode, 1 x 30,000 in | ms/step | 7.40 | 7.40 | 7.74 | yes |",
        "Asked and peer are for one H100 80GB.",
    ):
        assert f"{line}\n" in text, line


@pytest.mark.parametrize("changes", [{"divided_by": 16}, {"geometry": "tiny"}])
def test_another_size_is_not_judged(changes: dict[str, Any]) -> None:
    assert set(verdicts(prompt_tables.long_prompts([long_prompts(1.0, **changes)]))) == {"-"}


def test_results_with_other_flags_are_columns_and_the_first_is_judged() -> None:
    other = long_prompts(2.0, flags={"chunked_prefill_size": 512}, attention_backend="flashinfer")
    other["rows"] = other["rows"][:2]
    text = prompt_tables.long_prompts([long_prompts(1.0), other])
    head = "| load | unit | default flags | flashinfer, --chunked-prefill-size 512 | asked |"
    assert head in text
    assert "| 1 x (16,384 in, 1 out) | s | 0.465 | 0.930 | 0.465 | 0.492 | yes |\n" in text
    assert "| 1 x (30,000 in, 1 out) | s | 1.010 | - | 1.010 | 1.071 | yes |\n" in text


def test_a_prefill_is_shown_in_milliseconds_by_kind_with_its_speeds() -> None:
    columns = [
        {
            "load": f"{length:,} tokens",
            "kinds_us": {"attention": 1000.0 * length, "matrix products": 90500.0},
            "idle_us": 250.0,
            "profiled_us": 95000.0,
            "wall_us": 94100.0,
            "tflop_s": {"matrix products": 741.6, **({"attention": 400.0} if length > 4 else {})},
            "kernels_per_step": 1234.0,
            "num_turns": 3,
        }
        for length in (4, 9)
    ]
    assert prompt_tables.prefill_profile([{"rows": columns}]) == (
        "| ms per prompt | 4 tokens | 9 tokens |\n"
        "| --- | --- | --- |\n"
        "| matrix products | 90.5 | 90.5 |\n"
        "| attention | 4.0 | 9.0 |\n"
        "| gaps between kernels | 0.2 | 0.2 |\n"
        "| **profiled prefill** | 95.0 | 95.0 |\n"
        "| wall time, not profiled | 94.1 | 94.1 |\n"
        "| matrix products, TFLOP/s | 742 | 742 |\n"
        "| attention, TFLOP/s | - | 400 |\n"
        "| kernels | 1,234 | 1,234 |\n"
        "| turns of the scheduler | 3 | 3 |\n"
    )


def test_gaps_have_a_row_per_bound_and_those_without_one_are_not_judged() -> None:
    gaps = {"p50_ms": 7.0, "p99_ms": 8.26, "max_ms": 48.0}
    rows = [
        {
            "max_step_ms": value,
            "bound_ms": bound_ms,
            "alone": gaps,
            "beside": {**gaps, "p50_ms": 39.0},
            "first_token_s": 1.234,
            "first_token_s_on_idle": 1.0,
            "is_within": is_within,
        }
        for value, bound_ms, is_within in (
            ("default", 40.0, True),
            ("0", 0.0, None),
            ("20", 20.0, False),
        )
    ]
    result = {"how": "Engine.async_generate", "streams": 64, "prompt_len": 32760, "rows": rows}
    text = prompt_tables.step_gaps([result, {**result, "how": "in-process", "rows": rows[2:]}])
    assert text.startswith("64 streams, alone and beside a prompt of 32,760 tokens; gaps in ms:\n")
    times = "7.0 | 8.3 | 39.0 | 8.3 | 48.0 | 1.23 | 1.00"
    assert f"| default (40) | {times} | yes |\n| 0 | {times} | - |\n" in text
    assert text.endswith(f"| 20 | {times} | **no** |\n| 20, steps alone | {times} | **no** |\n")


def http_streams(**changes: Any) -> dict[str, Any]:
    at_once = {"tok_s": 6218.0, "first_token_p50_ms": 95.1, "gap_p99_ms": 43.0}
    figures = {"at_once": at_once, "alone": {"first_token_p50_ms": 14.5}}
    return {**SERVER, **goals.HTTP_STREAMS_SHAPE, **figures, **changes}


def test_streams_are_judged_figure_by_figure() -> None:
    assert prompt_tables.http_streams([http_streams()]) == (
        "| 128 at once, 512 in, 128 out | default flags | asked | peer (Triton) | reached |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| output tokens/s | 6,218 | 6,218 | 5,152 | yes |\n"
        "| first token p50, ms | 95.10 | 95.00 | 936.00 | **no** |\n"
        "| gap p99, ms | 43.00 | 44.00 | 66.00 | yes |\n"
        "| one at a time: first token p50, ms | 14.50 | 15.00 | 34.00 | yes |\n"
        "\nAsked and peer are for one H100 80GB.\n"
    )
    assert set(verdicts(prompt_tables.http_streams([http_streams(clients=8)]))) == {"-"}


def test_loading_is_judged_by_its_seconds_and_by_the_pool() -> None:
    peak = {"VmHWM": 16500, "own": 1330}
    rows = [
        {"load_format": "auto", "ready_s": 15.2, "kv_share": 0.97},
        {"load_format": "dummy", "ready_s": 15.2, "kv_share": 0.9699},
        {"load_format": "dummy", "ready_s": 15.2},
    ]
    rows = [{**row, "peak_mib": peak, "kv_tokens": 435_000} for row in rows]
    result = {"geometry": GEOMETRY, "checkpoint_bytes": 16.06e9, "rows": rows}
    lines = prompt_tables.load_weights([result]).splitlines()
    memory = "16,500 | 1,330 | 435,000"
    assert lines[2:] == [
        f"| 16.1 GB of safetensors | 15.2 | **no** | {memory} | 0.970 | yes |",
        f"| --load-format dummy | 15.2 | - | {memory} | 0.970 | **no** |",
        f"| --load-format dummy | 15.2 | - | {memory} | - | - |",
    ]
    small = prompt_tables.load_weights([{**result, "geometry": "tiny"}])
    assert "| 16.1 GB of safetensors | 15.2 | - |" in small
