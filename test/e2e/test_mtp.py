"""Multi-token prediction as a user has it: HTTP, streams, the Engine, stop strings, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sglang
from serving_utils import DUMMY, RunningServer, events, make_model_dir, running_server

PROMPT = "def add(a, b):\n    "
ADAPT = {"mtp_enabled": True, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.9]}
STATIC = {"mtp_enabled": True, "mtp_k": 3}
VERIFY = {"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "temperature": 0}
PLAIN = {"temperature": 0}
MODES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "static": STATIC,
    "conf_adapt": ADAPT,
    "verified": VERIFY,
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(trace: Path) -> Iterator[RunningServer]:
    flags = ("--max-running-requests", "8")
    variables = {"SGLANG_MTP_DEBUG_TRACE": str(trace), "SGLANG_MTP_FIXED_K": "1"}
    with running_server("demo", *flags, **variables) as server:
        yield server


def generate(server: RunningServer, text: str, params: dict[str, Any]) -> dict[str, Any]:
    body = {"text": text, "sampling_params": {"max_new_tokens": 40, **params}}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_of_all_kinds_at_once_get_what_they_get_alone(server: RunningServer) -> None:
    prompts = [PROMPT, "import os\n", "class Queue:\n    def __init__", "for i in range("]
    jobs = [(prompt, mode) for prompt in prompts for mode in MODES.values()]
    alone = [generate(server, *job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: generate(server, *job), jobs))
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    for index in range(0, len(jobs), len(MODES)):
        assert together[index]["output_ids"] == together[index + 3]["output_ids"], "lossless"
    state = server.wait_idle()
    for name in ("legacy_missing_tokens", "orphan_token_count", "overlap_token_count"):
        assert state[name] == 0


def test_the_debug_trace_has_the_k_of_each_step(server: RunningServer, trace: Path) -> None:
    for mode in ("static", "verified"):
        generate(server, PROMPT, MODES[mode])
        server.wait_idle()
        traced = {json.loads(line)["k"] for line in trace.read_text().splitlines()}
        assert MODES[mode]["mtp_k"] in traced


@pytest.mark.long_matrix
@pytest.mark.parametrize("mode", MODES)
def test_meta_info_says_how_many_tokens_each_step_gave(server: RunningServer, mode: str) -> None:
    meta = generate(server, PROMPT, MODES[mode])["meta_info"]
    if mode == "plain":
        assert "mtp_effective_k" not in meta
        assert "mtp_avg_effective_k" not in meta
        return
    steps = meta["mtp_effective_k"]
    assert sum(steps) == meta["completion_tokens"] == 40
    assert meta["mtp_avg_effective_k"] == pytest.approx(40 / len(steps))
    assert all(1 <= step <= MODES[mode]["mtp_k"] for step in steps)
    assert len(steps) < 40 or mode == "conf_adapt"


@pytest.mark.long_matrix
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_is_cumulative_and_ends_like_the_answer(server: RunningServer, mode: str) -> None:
    whole = generate(server, PROMPT, MODES[mode])
    body = {
        "text": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 40, **MODES[mode]},
    }
    with server.client.stream("POST", "/generate", json=body) as response:
        chunks = list(events(response.iter_lines()))
    assert chunks.pop() == "[DONE]"
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    if mode != "plain":
        assert chunks[-1]["meta_info"]["mtp_effective_k"] == whole["meta_info"]["mtp_effective_k"]
        assert all(
            sum(chunk["meta_info"]["mtp_effective_k"]) == len(chunk["output_ids"])
            for chunk in chunks
        )


@pytest.mark.long_matrix
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_ends_a_run_in_its_middle(server: RunningServer, mode: str) -> None:
    whole = generate(server, PROMPT, MODES[mode])
    text = whole["text"]
    for start in range(4, 40, 5):
        stop = text[start : start + 3]
        answer = generate(server, PROMPT, {**MODES[mode], "stop": [stop]})
        assert answer["text"] == text[: text.index(stop)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        count = answer["meta_info"]["completion_tokens"]
        assert answer["output_ids"] == whole["output_ids"][:count]
        if mode != "plain":
            assert sum(answer["meta_info"]["mtp_effective_k"]) == count


@pytest.mark.long_matrix
@pytest.mark.parametrize("mode", MODES)
def test_no_stop_text_ends_a_run_before_min_new_tokens(server: RunningServer, mode: str) -> None:
    params = {**MODES[mode], "min_new_tokens": 12, "max_new_tokens": 24}
    text = generate(server, PROMPT, params)["text"]
    minimum = generate(server, PROMPT, {**params, "max_new_tokens": 12})["text"]
    assert text.startswith(minimum)
    for stop in (minimum[-2:], text[len(minimum) - 1 : len(minimum) + 2]):
        end = text.find(stop, len(minimum) - len(stop) + 1)
        answer = generate(server, PROMPT, {**params, "stop": [stop]})
        assert answer["text"] == (text if end < 0 else text[:end])
        assert answer["meta_info"]["completion_tokens"] > 12


def test_a_broken_rule_is_400_and_costs_nothing(server: RunningServer) -> None:
    for params, field in (
        ({"mtp_k": 3}, "mtp_k"),
        ({**STATIC, "temperature": 0.5}, "temperature"),
        ({**STATIC, "mtp_k": 9}, "mtp_k"),
        ({"mtp_enabled": True, "mtp_strategy": "greedy"}, "mtp_strategy"),
        ({**STATIC, "presence_penalty": 1.0}, "mtp_enabled"),
    ):
        response = server.post("/generate", {"text": PROMPT, "sampling_params": params})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"sampling_params.{field}"
    state = server.wait_idle()
    assert state["req_to_token_pool_used"] == 0


def test_samples_of_one_prompt_share_what_they_are_told(server: RunningServer) -> None:
    answers = generate(server, PROMPT, {**ADAPT, "n": 3})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    assert all("mtp_effective_k" in answer["meta_info"] for answer in answers)


@pytest.mark.long_matrix
def test_clients_that_know_nothing_of_it_get_the_preferred_parameters(tmp_path: Path) -> None:
    """With the mask token of a flag, as of a model that has none itself."""
    preferred = {"mtp_enabled": True, "mtp_verify": True, "mtp_k": 4, "ignore_eos": True}
    flags = ("--preferred-sampling-params", json.dumps(preferred), "--mtp-mask-token-id", "2")
    with running_server(make_model_dir(tmp_path / "model"), *DUMMY, *flags) as server:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
        answer = server.post("/generate", body).json()
        assert sum(answer["meta_info"]["mtp_effective_k"]) == 20
        off = {**body, "sampling_params": {**body["sampling_params"], "mtp_enabled": False}}
        plain = server.post("/generate", off).json()
        assert "mtp_effective_k" not in plain["meta_info"]
        assert plain["output_ids"] == answer["output_ids"]
        [model] = server.client.get("/v1/models").json()["data"]
        openai = {"model": model["id"], "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        completion = server.post("/v1/completions", openai).json()
        assert completion["choices"][0]["text"] == plain["text"]


@pytest.mark.long_matrix
def test_the_engine_takes_the_same_parameters() -> None:
    with sglang.Engine(model_path="demo", disable_overlap_schedule=True) as engine:
        params = [{"max_new_tokens": 30, **mode} for mode in MODES.values()]
        answers = engine.generate([PROMPT] * len(params), params)
        assert answers[0]["output_ids"] == answers[3]["output_ids"]
        struct = sglang.SamplingParams(max_new_tokens=30, **STATIC)
        assert engine.generate(PROMPT, struct)["output_ids"] == answers[1]["output_ids"]
        with pytest.raises(ValueError, match="mtp_k"):
            engine.generate(PROMPT, {"mtp_enabled": True, "mtp_k": 0})
