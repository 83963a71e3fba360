"""A server and an Engine with a head that drafts: tokens, figures, refusals."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save

import sglang
from draft_heads import Sizes, eagle_config, eagle_shapes, random_tensors, write_head
from mtp_oracle import greedy_outputs
from serving_utils import RunningServer, running_server

pytestmark = pytest.mark.long_matrix

NUM_TOKENS = 48
SIZES = Sizes(256, 64, 2, 1, 128, 4096, 4096)
PROMPTS = ["def add(a, b):\n    return a + b\n\n\n" * 8, "import os\n", "[0, 0, 0, 0, 0, 0, 0,"]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """Returns the tokens that transformers gives for PROMPTS."""
    return greedy_outputs(PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def server(
    right: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A random head that may draft one token alone, the most frequent one."""
    folder = tmp_path_factory.mktemp("head")
    head = write_head(folder, eagle_config(SIZES), random_tensors(eagle_shapes(SIZES)))
    [(token, _)] = Counter(itertools.chain(*right)).most_common(1)
    (folder / "map.json").write_text(json.dumps([token]))
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head))
    chains = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    chains += ("--speculative-load-aware", "off")
    token_map = ("--speculative-token-map", str(folder / "map.json"))
    with running_server("demo", *flags, *chains, *token_map, SGLANG_KV_CANARY="1") as server:
        yield server


def test_answers_are_those_of_the_model_with_figures_of_drafts(
    server: RunningServer, right: list[list[int]]
) -> None:
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    num_confirmed = num_proposed = 0
    answers = server.post("/generate", {"text": PROMPTS, "sampling_params": params}).json()
    for tokens, answer in zip(right, answers, strict=True):
        assert answer["output_ids"] == tokens
        meta = answer["meta_info"]
        histogram = meta["spec_accept_histogram"]
        assert meta["spec_verify_ct"] == sum(histogram)
        confirmed = sum(count * each for count, each in enumerate(histogram))
        assert meta["spec_accepted_drafts"] == meta["spec_num_correct_drafts"] == confirmed
        assert meta["spec_accept_token_num"] == confirmed
        assert meta["spec_proposed_drafts"] == meta["spec_draft_token_num"] == 2 * sum(histogram)
        assert meta["spec_accept_rate"] == pytest.approx(confirmed / (2 * sum(histogram)))
        assert meta["spec_accept_length"] == pytest.approx(1 + confirmed / sum(histogram))
        num_confirmed += confirmed
        num_proposed += meta["spec_proposed_drafts"]
    assert 0 < num_confirmed < num_proposed
    state = server.wait_idle()
    assert (state["speculative_num_steps"], state["speculative_num_draft_tokens"]) == (2, 3)
    assert 1 < state["avg_spec_accept_length"] < 3
    info = server.client.get("/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("EAGLE", 3)


def test_metrics_are_those_of_the_answers(server: RunningServer) -> None:
    """Streamed, not streamed, in a batch, and aborted before its end."""
    before = metrics_of(server)
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    metas = [
        answer["meta_info"]
        for answer in server.post("/generate", {"text": PROMPTS, "sampling_params": params}).json()
    ]
    body = {"text": PROMPTS[0], "sampling_params": {**params, "max_new_tokens": 3000}}
    with server.client.stream(
        "POST", "/generate", json={**body, "rid": "a", "stream": True}
    ) as got:
        lines = (line for line in got.iter_lines() if line.startswith("data: {"))
        for _ in range(4):
            next(lines)
        assert server.post("/abort_request", {"rid": "a"}).status_code == 200
        streamed = json.loads(list(lines)[-1].removeprefix("data: "))["meta_info"]
    assert streamed["finish_reason"]["type"] == "abort"
    assert server.post("/flush_cache", {}).status_code == 200
    after = metrics_of(server)

    def grown(name: str, streams: bool) -> float:
        key = f"sglang:{name}", str(streams).lower()
        return after[key] - before[key]

    for streams, given in ((False, metas), (True, [streamed])):
        assert grown("num_requests_total", streams) == len(given)
        assert grown("num_aborted_requests_total", streams) == streams
        for name, field in (
            ("prompt_tokens_total", "prompt_tokens"),
            ("generation_tokens_total", "completion_tokens"),
            ("cached_tokens_total", "cached_tokens"),
        ):
            assert grown(name, streams) == sum(meta[field] for meta in given), name
        for name in ("time_to_first_token", "e2e_request_latency", "queue_time"):
            assert grown(f"{name}_seconds_count", streams) == len(given), name
    confirmed = sum(meta.get("spec_num_correct_drafts", 0) for meta in (*metas, streamed))
    key = "sglang:spec_confirmed_drafts_total", ""
    # A step that is in flight at the abort has no reader.
    assert confirmed <= after[key] - before[key] <= confirmed + 2
    assert after["sglang:spec_tier_switches_total", ""] == 0, "one tier, and no switch"
    assert "sglang:spec_accept_length" not in {name for name, _ in after}, "flushed"


def metrics_of(server: RunningServer) -> dict[tuple[str, str], float]:
    """Values of `/metrics` by name and is_streaming."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("is_streaming", "")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_drafts_by_load_behind_prompts_that_are_read_in_chunks(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of chunks alone nobody emits, and nobody is given drafts."""
    monkeypatch.setenv("SGLANG_KV_CANARY", "1")
    head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "demo-eagle3"}
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    with sglang.Engine(
        model_path="demo",
        device="cpu",
        attention_backend="torch_native",
        chunked_prefill_size=16,
        max_total_tokens=2048,
        speculative_load_aware="on",
        **head,
    ) as engine:
        answers = [engine.generate(prompt, params) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in answers] == right


def test_the_head_changes_and_tokens_do_not(
    server: RunningServer, right: list[list[int]], tmp_path: Path
) -> None:
    """Updates by raw bytes, from a folder, with the target in a session; answers say which."""
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    body = {"text": PROMPTS, "sampling_params": params}
    tensors = random_tensors(eagle_shapes(SIZES), seed=3)
    folder = write_head(tmp_path / "new", eagle_config(SIZES), tensors)
    raw = {"content-type": "application/octet-stream"}
    path = "/update_weights_from_tensor?selector=draft&weight_version=h1"
    answer = server.client.post(path, content=save(tensors), headers=raw).json()
    assert (answer["message"], answer["draft_weight_version"]) == ("Weights updated.", "h1")
    got = server.post("/get_weights_by_name", {"name": "draft.fc.weight", "truncate_size": 1})
    assert got.json() == tensors["fc.weight"][:1].tolist()
    for changes, version, stays in (
        ({"model_path": "demo", "weight_version": "t2"}, ("t2", "h1"), True),
        ({"model_path": str(folder), "selector": "draft"}, ("t2", "h1"), False),
        ({"model_path": "demo", "draft_model_path": str(folder)}, ("t2", "h1"), False),
    ):
        answer = server.post("/update_weights_from_disk", changes).json()
        assert answer["success"]
        assert ("draft model keeps its own" in answer["message"]) == stays
        state = server.client.get("/server_info").json()["internal_states"][0]
        assert (state["weight_version"], state["draft_weight_version"]) == version
    answers = server.post("/generate", body).json()
    assert [answer["output_ids"] for answer in answers] == right
    for answer in answers:
        span = {"version": "h1", "start": 0, "end": NUM_TOKENS}
        assert answer["meta_info"]["draft_weight_versions"] == [span]
        assert answer["meta_info"]["weight_version"] == "t2"
    wrong = server.post("/update_weights_from_disk", {"model_path": "demo", "selector": "draft"})
    assert wrong.status_code == 400
    assert "does not know" in wrong.json()["message"]


def test_multi_token_prediction_is_refused_with_the_reason(server: RunningServer) -> None:
    body = {"text": "x", "sampling_params": {"mtp_enabled": True}}
    refused = server.post("/generate", body)
    assert refused.status_code == 400
    assert "--speculative-algorithm" in refused.json()["error"]["message"]
