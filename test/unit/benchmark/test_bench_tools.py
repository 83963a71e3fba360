"""Benchmark tools: data sets, figures and printed rows."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from sglang.bench_serving import auth_headers, make_parser
from sglang.benchmark.client import RequestOptions, completion_body, native_body
from sglang.benchmark.datasets import BenchPrompt, DatasetError, load_prompts
from sglang.benchmark.metrics import RequestResult, percentile, report_rows, summarize


def args_of(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(list(flags))


def test_random_prompts_repeat_with_the_seed_and_keep_their_bounds() -> None:
    flags = ("--num-prompts", "200", "--random-input-len", "40", "--random-range-ratio", "0.5")
    first, again = load_prompts(args_of(*flags), 100), load_prompts(args_of(*flags), 100)
    assert first == again
    assert load_prompts(args_of(*flags, "--seed", "2"), 100) != first
    lengths = {len(prompt.ids or []) for prompt in first}
    assert (min(lengths), max(lengths)) == (20, 40)
    assert all(3 <= token < 100 for prompt in first for token in prompt.ids or [])


def test_ratio_one_is_exact() -> None:
    flags = ("--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "9")
    prompts = load_prompts(args_of(*flags, "--random-range-ratio", "1"), 50)
    assert {(len(p.ids or []), p.output_len) for p in prompts} == {(7, 9)}


def test_shared_prefix_groups_share_their_prefix() -> None:
    flags = ("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3")
    prompts = load_prompts(args_of(*flags, "--gsp-prompts-per-group", "4"), 100)
    assert len(prompts) == 12
    assert len({tuple((p.ids or [])[:512]) for p in prompts}) == 3


def test_files_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "a", "output_len": 3}\n\n{"prompt": [5, 6]}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(custom), "--num-prompts", "3")
    assert load_prompts(args_of(*flags), 100) == [
        BenchPrompt("a", None, 3),
        BenchPrompt(None, [5, 6], 128),
        BenchPrompt("a", None, 3),
    ]
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"conversations": [{"value": "q"}, {"value": "x" * 40}]}]))
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(share), "--num-prompts", "1")
    assert load_prompts(args_of(*flags), 100) == [BenchPrompt("q", None, 10)]
    custom.write_text('{"text": "a"}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(custom))
    with pytest.raises(DatasetError, match="line 1"):
        load_prompts(args_of(*flags), 100)
    with pytest.raises(DatasetError, match="--dataset-path"):
        load_prompts(args_of("--dataset-name", "sharegpt"), 100)


def test_percentile_equals_the_statistics_module() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent / 100) == pytest.approx(expected[percent - 1])
    assert percentile([], 0.5) == 0.0


def test_summary_adds_up_and_failures_do_not_count() -> None:
    results = [
        RequestResult(prompt_len=10, output_len=5, latency=1.0, ttft=0.2, itl=[0.2] * 4),
        RequestResult(prompt_len=20, output_len=1, latency=0.5, ttft=0.5),
        RequestResult(error="HTTP 503"),
    ]
    summary = summarize(results, 2.0)
    assert summary["completed"] == 2
    assert summary["total_input_tokens"] == 30
    assert summary["output_throughput"] == 3.0
    assert summary["mean_ttft_ms"] == pytest.approx(350)
    assert summary["mean_tpot_ms"] == pytest.approx(200)
    assert summary["concurrency"] == pytest.approx(0.75)
    rows = report_rows({**summary, "accept_length": 1.5})
    assert "{:<40} {:<10.2f}".format("Mean TTFT (ms):", 350.0) in rows
    assert any(row.startswith("Accept length:") for row in rows)


@pytest.mark.parametrize("build", [native_body, completion_body])
def test_extra_body_fields_win(build: Any) -> None:
    options = RequestOptions("m", True, True, {"temperature": 0.5})
    assert build(BenchPrompt("a", None, 3), options)["temperature"] == 0.5


@pytest.mark.parametrize(
    ("environ", "header"),
    [
        ({}, None),
        ({"OPENAI_API_KEY": ""}, None),
        ({"OPENAI_API_KEY": "schlüssel"}, "Bearer schlüssel"),
        ({"API_KEY": "Basic x"}, "Basic x"),
        ({"OPENAI_API_KEY": "one", "API_KEY": "two"}, "Bearer one"),
    ],
)
def test_the_key_of_the_environment_goes_to_the_server(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], header: str | None
) -> None:
    for name in ("OPENAI_API_KEY", "API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    wanted = {} if header is None else {b"Authorization": header.encode()}
    assert auth_headers() == wanted
