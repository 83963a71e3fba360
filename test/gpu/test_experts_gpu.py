"""Mixtures of experts on a GPU: recorded graphs hold for other choices of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_harness import Model, assert_greedy, sequence
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup, make_random_model, make_runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

SETUP = Setup(num_pages=4000, page_size=1, chunked_prefill_size=40)
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_recorded_choice_is_made_anew_by_each_replay(dtype: torch.dtype) -> None:
    from sglang.srt.layers.ops.torch_ops import TorchOps
    from sglang.srt.layers.ops.triton_ops import TritonOps

    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    ops, oracle = TritonOps(device), TorchOps(device)
    gate_up, down = drawn(16, 256, 64) / 8, drawn(16, 64, 128) / 11
    x, scores = drawn(9, 64), drawn(9, 16)
    ops.experts(x, scores, gate_up, down, 4, True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.experts(x, scores, gate_up, down, 4, True)
    for used in (16, 4, 9):  # experts with any rows
        x.copy_(drawn(9, 64))
        scores.copy_(drawn(9, 16))
        scores[:, used:] = -30.0
        graph.replay()
        wide = [each.double() for each in (x, scores, gate_up, down)]
        expected = oracle.experts(*wide, 4, True)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_replayed_steps_give_the_tokens_of_transformers(tmp_path: Path, model_type: str) -> None:
    path = make_random_model(model_type, tmp_path / "model", head_dim=64, **FAMILIES[model_type])
    more = {"device": "cuda", "attention_backend": "triton", "dtype": "float32"}
    runner = make_runner(path, SETUP, max_graph_width=1, **more)
    assert runner.num_graphs > 0
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    harness = SchedulerHarness(SETUP, TpModelWorker(runner, state))
    asked = [sequence(length, seed=length) for length in (1, 33, 70, 120)]
    outputs = harness.generate(asked, temperature=0.0, max_new_tokens=30, ignore_eos=True)
    reference = Model(path)
    for prompt, output in zip(asked, outputs, strict=True):
        assert_greedy(reference, prompt, output)
