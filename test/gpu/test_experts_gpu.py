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


TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}


class Layer:
    """Random experts on the GPU, and rows with scores, whose memory stays where it is."""

    def __init__(self, dtype: torch.dtype, num_rows: int, num_experts: int, size: int) -> None:
        self._generator = torch.Generator().manual_seed(num_rows)
        self._dtype = dtype
        hidden = 2 * size // 3 * 2
        self.gate_up = self._drawn(num_experts, 2 * size, hidden) / hidden**0.5
        self.down = self._drawn(num_experts, hidden, size) / size**0.5
        self.x, self.scores = self._drawn(num_rows, hidden), self._drawn(num_rows, num_experts)
        self.draw_rows(num_experts)

    def _drawn(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to("cuda", self._dtype)

    def draw_rows(self, num_used: int) -> None:
        """Makes new rows, which choose among the first experts; no scores of a row are equal."""
        self.x.copy_(self._drawn(*self.x.shape))
        noise = torch.rand(self.scores.shape, generator=self._generator)
        self.scores.copy_(noise.argsort(-1) / 16)
        self.scores[:, num_used:] = -30.0

    def compute(self, ops: Any) -> torch.Tensor:
        made: torch.Tensor = ops.experts(self.x, self.scores, self.gate_up, self.down, 4, True)
        return made

    def assert_right(self, found: torch.Tensor, oracle: Any) -> None:
        wide = [each.double() for each in (self.x, self.scores, self.gate_up, self.down)]
        expected = oracle.experts(*wide, 4, True)
        tolerance = TOLERANCE[self._dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_experts", "size"),
    [
        *((torch.bfloat16, num_rows, 16, 192) for num_rows in (1, 2, 9, 33, 64, 128, 300, 512)),
        (torch.bfloat16, 40, 128, 768),
        (torch.bfloat16, 9, 16, 54),  # rows that are not aligned
        (torch.float16, 9, 16, 192),
        (torch.float32, 1, 16, 192),
        (torch.float32, 70, 16, 48),
    ],
    ids=str,
)
def test_a_recorded_choice_is_made_anew_by_each_replay(
    dtype: torch.dtype, num_rows: int, num_experts: int, size: int
) -> None:
    from sglang.srt.layers.ops.torch_ops import TorchOps
    from sglang.srt.layers.ops.triton_ops import TritonOps

    device = torch.device("cuda")
    ops, oracle = TritonOps(device), TorchOps(device)
    layer = Layer(dtype, num_rows, num_experts, size)
    layer.compute(ops)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.compute(ops)
    for num_used in (num_experts, 4, 9):  # experts with any rows
        layer.draw_rows(num_used)
        graph.replay()
        layer.assert_right(out, oracle)
        assert torch.equal(out, layer.compute(ops))


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
