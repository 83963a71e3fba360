"""Decoders by transformers' modelling code on a GPU: with graphs, the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_harness import Model, assert_greedy, sequence
from sglang.srt.models.transformers_model import TransformersModel
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup, make_random_model, make_runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

SETUP = Setup(num_pages=4000, page_size=1, chunked_prefill_size=40)
MIXED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**MIXED, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 3},
    "gemma3_text": MIXED,
    "granite": {"attention_multiplier": 0.7, "logits_scaling": 2.0},
    "glm4": {},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_replayed_steps_give_the_tokens_of_transformers(tmp_path: Path, model_type: str) -> None:
    entries = {"head_dim": 64, "pad_token_id": 0, **FAMILIES[model_type]}
    path = make_random_model(model_type, tmp_path / "model", **entries)
    more = {"device": "cuda", "attention_backend": "triton", "dtype": "float32"}
    runner = make_runner(path, SETUP, max_graph_width=1, **more)
    assert isinstance(runner.model, TransformersModel)
    assert runner.num_graphs > 0
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    harness = SchedulerHarness(SETUP, TpModelWorker(runner, state))
    asked = [sequence(length, seed=length) for length in (1, 33, 70, 120)]
    options = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    reference = Model(path)
    for _ in range(2):  # the second time the prompts are cached
        outputs = harness.generate(asked, **options)
        for prompt, output in zip(asked, outputs, strict=True):
            assert_greedy(reference, prompt, output)
