"""A server and an Engine with a head that drafts: tokens, figures, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draft_heads import Sizes, eagle_config, eagle_shapes, random_tensors, write_head
from mtp_oracle import load_reference
from serving_utils import RunningServer, running_server
from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer

HIDDEN, NUM_TOKENS = 256, 48
SIZES = Sizes(HIDDEN, 64, 2, 1, 128, 4096, 4096)
PROMPTS = ["def add(a, b):\n    return a + b\n\n\n" * 8, "import os\n", "[0, 0, 0, 0, 0, 0, 0,"]
CHAINS = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It drafts what it is fed again, so it is right where tokens repeat."""
    tensors = random_tensors(eagle_shapes(SIZES))
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensors[name] *= 0.01
    tensors["fc.weight"][:, :HIDDEN] += torch.eye(HIDDEN)
    del tensors["embed_tokens.weight"]
    return write_head(tmp_path_factory.mktemp("head"), eagle_config(SIZES), tensors)


@pytest.fixture(scope="module")
def server(head: Path) -> Iterator[RunningServer]:
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head))
    with running_server("demo", *flags, *CHAINS, SGLANG_KV_CANARY="1") as server:
        yield server


def test_answers_are_those_of_the_model_with_figures_of_drafts(server: RunningServer) -> None:
    path = resolve_model_path("demo")
    reference, tokenizer = load_reference(path), load_tokenizer(path)
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    num_steps = num_confirmed = num_proposed = 0
    answers = server.post("/generate", {"text": PROMPTS, "sampling_params": params}).json()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        right = reference.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1)
        assert answer["output_ids"] == right[0, ids.shape[1] :].tolist()
        meta = answer["meta_info"]
        histogram = meta["spec_accept_histogram"]
        assert meta["spec_verify_ct"] == sum(histogram)
        confirmed = sum(count * each for count, each in enumerate(histogram))
        assert meta["spec_accepted_drafts"] == meta["spec_num_correct_drafts"] == confirmed
        assert meta["spec_proposed_drafts"] == 2 * sum(histogram)
        assert meta["spec_accept_rate"] == pytest.approx(confirmed / (2 * sum(histogram)))
        assert meta["spec_accept_length"] == pytest.approx(1 + confirmed / sum(histogram))
        num_steps, num_confirmed = num_steps + sum(histogram), num_confirmed + confirmed
        num_proposed += meta["spec_proposed_drafts"]
    assert 0 < num_confirmed < num_proposed
    state = server.wait_idle()
    assert (state["speculative_num_steps"], state["speculative_num_draft_tokens"]) == (2, 3)
    assert 1 < state["avg_spec_accept_length"] < 3
    info = server.get("/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("EAGLE", 3)
    assert "sglang:spec_accept_length" in server.get("/metrics").text


def test_multi_token_prediction_is_refused_with_the_reason(server: RunningServer) -> None:
    body = {"text": "x", "sampling_params": {"mtp_enabled": True}}
    refused = server.post("/generate", body)
    assert refused.status_code == 400
    assert "--speculative-algorithm" in refused.json()["error"]["message"]
