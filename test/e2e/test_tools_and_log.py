"""Benchmark tools and the request log against a real server; slow readers; the OpenAPI document."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from hostile_bodies import GENERATES, shorten
from serving_utils import RunningServer, open_request
from sglang import bench_offline_throughput, bench_one_batch, bench_serving

NUM_SLOW = 20
# Bodies of each kind, positive or negative, for a route; others have fewer.
NUM_BODIES = dict.fromkeys(GENERATES, 20) | {"/detokenize": 20}
NUM_OTHER_BODIES = 6
# Routes that need a folder, a trainer, a name, an earlier call or rest, besides a body.
NEEDS_MORE = re.compile("weight|group|memory|profile|flush|{model}")


@pytest.fixture(scope="module")
def server(openai_server: RunningServer) -> RunningServer:
    return openai_server


@pytest.mark.long_matrix
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
@pytest.mark.parametrize("stream", [True, False])
def test_bench_serving_completes_and_reports(
    server: RunningServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    backend: str,
    stream: bool,
) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["--base-url", server.url, "--backend", backend, "--num-prompts", "12"]
    flags += ["--random-input-len", "20", "--random-output-len", "6", "--random-range-ratio", "1"]
    flags += ["--disable-tqdm", "--output-file", str(out), "--max-concurrency", "4"]
    flags += [] if stream else ["--disable-stream"]
    assert bench_serving.main(flags) == 0
    result = json.loads(out.read_text())
    assert result["completed"] == 12
    assert result["total_input_tokens"] == 12 * 20
    assert result["total_output_tokens"] == 12 * 6
    assert "Successful requests:                     12" in capsys.readouterr().out


@pytest.mark.long_matrix
def test_offline_and_one_batch_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    common = ["--model-path", "demo", "--log-level", "error", "--result-filename", str(out)]
    flags = [*common, "--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5"]
    assert bench_offline_throughput.main([*flags, "--random-range-ratio", "1"]) == 0
    flags = [*common, "--batch-size", "1", "3", "--input-len", "9", "--output-len", "5"]
    assert bench_one_batch.main(flags) == 0
    offline, one, three = (json.loads(line) for line in out.read_text().splitlines())
    assert offline["successful_requests"] == 6
    assert (offline["total_input_tokens"], offline["total_output_tokens"]) == (54, 30)
    assert (one["batch_size"], three["batch_size"]) == (1, 3)
    assert "Prefill. latency" in capsys.readouterr().out


def test_request_log_has_one_line_per_sample_and_none_for_no_logs(
    server: RunningServer, request_log: Path
) -> None:
    forged = 'x"}\n{"rid": "forged"}'
    body = {
        "text": forged,
        "rid": "logged",
        "custom_labels": {"team": forged},
        "sampling_params": {"max_new_tokens": 3, "n": 2, "temperature": 0},
    }
    assert server.post("/generate", body).status_code == 200
    assert server.post("/generate", {**body, "rid": "hidden", "no_logs": True}).status_code == 200
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and request_log.read_text().count('"logged"') < 2:
        time.sleep(0.05)
    lines = [json.loads(line) for line in request_log.read_text().splitlines()]
    mine = [line for line in lines if line["rid"] == "logged"]
    assert len(mine) == 2
    assert {line["rid"] for line in lines}.isdisjoint({"hidden", "forged"})
    assert len({line["request_id"] for line in mine}) == 1
    for line in mine:
        assert line["custom_labels"] == {"team": forged}
        assert line["prompt"] == forged
        assert line["completion_tokens"] == 3
        assert line["finish_reason"] == "length"
        assert 0 < line["ttft"] <= line["e2e_latency"]


def _slow_reader(server: RunningServer) -> socket.socket:
    """A client of a long stream that does not read."""
    params = {"max_new_tokens": 3000, "temperature": 0.9, "ignore_eos": True}
    return open_request(server, {"text": "def ", "stream": True, "sampling_params": params})


@pytest.mark.long_matrix
def test_slow_readers_hold_nobody_up_and_grow_no_memory(server: RunningServer) -> None:
    """Cumulative chunks of one such stream add up to some 20 MB; unread ones must not be kept."""
    server.generate(max_new_tokens=4)
    front = psutil.Process(server.process.pid)
    before = front.memory_info().rss
    clients = [_slow_reader(server) for _ in range(NUM_SLOW)]
    try:
        worst = 0.0
        for _ in range(6):
            for client in clients:
                client.recv(1)
            start = time.monotonic()
            assert server.generate(max_new_tokens=2).status_code == 200
            worst = max(worst, time.monotonic() - start)
            time.sleep(1.0)
        grown = front.memory_info().rss - before
    finally:
        for client in clients:
            client.close()
    assert worst < 2.0
    assert grown < 64 << 20
    server.wait_idle()


@pytest.mark.long_matrix
@pytest.mark.parametrize("is_right", [True, False], ids=["right bodies", "wrong bodies"])
def test_openapi_fuzz_finds_no_server_error(server: RunningServer, is_right: bool) -> None:
    """schemathesis, positive or negative cases, over every documented route. Each takes some of
    the bodies that its schema allows."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    num_calls = 0
    taken: Counter[str] = Counter()
    modes = schemathesis.GenerationMode
    mode = modes.POSITIVE if is_right else modes.NEGATIVE
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode.is_negative and "requestBody" not in operation.definition.raw:
            continue  # nothing to get wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_BODIES.get(operation.path, NUM_OTHER_BODIES),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def call(case: schemathesis.Case) -> None:
            nonlocal num_calls
            num_calls += 1
            if isinstance(case.body, dict):
                shorten(case.body, case.operation.path)
            answer = case.call_and_validate(checks=[not_a_server_error])
            is_positive = case.meta.generation.mode.is_positive
            taken[case.operation.path] += is_positive and answer.status_code == 200

        call()
    assert num_calls > 100
    takers = {path for path in schema.raw_schema["paths"] if not NEEDS_MORE.search(path)}
    assert takers >= {*GENERATES}
    assert not is_right or not {path for path in takers if not taken[path]}
    assert server.generate().status_code == 200
    state = server.wait_idle()
    assert state["orphan_token_count"] == state["legacy_missing_tokens"] == 0
