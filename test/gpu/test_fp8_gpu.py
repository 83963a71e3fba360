"""Weights of 8 bits on a GPU: products against their definition, recorded graphs, forms of
checkpoints, updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_models import FP8, fp8_tensors, is_rounded, tensors_of, write_fp8
from model_harness import sequence
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.scaled_weight import MIN_CAPABILITY, ScaledWeight, scaled
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.weight_format import CHANNEL
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup, make_execution, make_random_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
SETUP = Setup(num_pages=4000, page_size=1, chunked_prefill_size=40)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
ON_GPU: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "dtype": "bfloat16"}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def gpu_multiplies_in_8_bits() -> None:
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        pytest.skip("needs a GPU that multiplies in 8 bits")


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x with each row rounded to 8 bits by its largest value, in float64."""
    scales = x.float().abs().amax(1, keepdim=True) / 448
    scales[scales == 0] = 1.0
    return (x.float() / scales).clamp(-448, 448).to(FP8).double() * scales.double()


def drawn_weight(out_features: int, in_features: int, seed: int = 0) -> ScaledWeight:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(out_features, in_features, generator=generator, device=DEVICE)
    return scaled(values / in_features**0.5, CHANNEL)


@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 12288), (80, 48)])
def test_products_of_1_to_512_rows_are_those_of_rounded_rows(
    out_features: int, in_features: int
) -> None:
    from sglang.srt.layers.ops.triton_ops import TritonOps

    ops, weight = TritonOps(DEVICE), drawn_weight(out_features, in_features)
    generator = torch.Generator(DEVICE).manual_seed(1)
    bias = torch.randn(out_features, generator=generator, device=DEVICE).bfloat16()
    for num_rows in (1, 2, 3, 8, 16, 17, 32, 64, 65, 127, 128, 256, 511, 512):
        x = torch.randn(num_rows, in_features, generator=generator, device=DEVICE).bfloat16()
        x[0] *= 1e-3
        x[-1] *= 30
        for added in (None, bias):
            expected = rounded_rows(x) @ weight.values(torch.float64).T
            expected = expected if added is None else expected + added
            found = ops.linear(x, weight, added)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    nothing = torch.zeros(3, in_features, device=DEVICE, dtype=torch.bfloat16)
    assert not ops.linear(nothing, weight, None).any()
    nothing[1, 5] = torch.nan
    assert ops.linear(nothing, weight, None).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(("num_features", "in_features"), [(28672, 4096), (512, 256)])
def test_gated_products_of_1_to_200_rows_are_those_of_rounded_rows(
    num_features: int, in_features: int
) -> None:
    from sglang.srt.layers.ops.triton_ops import TritonOps

    ops, weight = TritonOps(DEVICE), drawn_weight(num_features, in_features)
    generator = torch.Generator(DEVICE).manual_seed(2)
    for num_rows in (1, 16, 17, 33, 64, 65, 128, 129, 200):
        x = torch.randn(num_rows, in_features, generator=generator, device=DEVICE).bfloat16()
        gate, up = (rounded_rows(x) @ weight.values(torch.float64).T).chunk(2, -1)
        found = ops.gated_linear(x, weight, None)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 14336)])
def test_a_row_is_the_same_alone_and_among_others_up_to_the_order_of_sums(
    out_features: int, in_features: int
) -> None:
    """Results differ by one step of bfloat16 at most, where they are not near 0."""
    from sglang.srt.layers.ops.triton_ops import TritonOps

    ops, weight = TritonOps(DEVICE), drawn_weight(out_features, in_features)
    x = torch.randn(512, in_features, device=DEVICE).bfloat16()
    whole = ops.linear(x, weight, None)
    for num_rows in (1, 16, 32, 64, 128, 129):
        found = ops.linear(x[:num_rows], weight, None)
        torch.testing.assert_close(found, whole[:num_rows], rtol=2**-7, atol=2e-3)


def test_a_recorded_product_rounds_the_rows_of_each_replay() -> None:
    from sglang.srt.layers.ops.triton_ops import TritonOps

    ops, weight = TritonOps(DEVICE), drawn_weight(512, 256)
    x = torch.randn(9, 256, device=DEVICE).bfloat16()
    ops.linear(x, weight, None)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weight, None)
    for size in (1.0, 1e-2, 50.0):
        x.copy_(torch.randn(9, 256, device=DEVICE) * size)
        graph.replay()
        expected = rounded_rows(x) @ weight.values(torch.float64).T
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * size)


def runner_of(path: Path, max_graph_width: int = 0, rounds: bool = False) -> ModelRunner:
    execution = make_execution(path, SETUP, max_graph_width=max_graph_width, **ON_GPU)
    model = replace(execution.model, rounds_weights=rounds)
    return make_runners(replace(execution, model=model)).target


def num_held(runner: ModelRunner) -> int:
    layers = [module for module in runner.model.modules() if isinstance(module, Linear)]
    return sum(layer.weight.dtype == FP8 for layer in layers)


def outputs_of(runner: ModelRunner) -> list[list[int]]:
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    harness = SchedulerHarness(SETUP, TpModelWorker(runner, state))
    asked = [sequence(length, seed=length) for length in (1, 33, 70, 120)]
    return harness.generate(asked, temperature=0.0, max_new_tokens=30, ignore_eos=True)


def test_replayed_steps_give_the_tokens_of_others(tmp_path: Path) -> None:
    """Up to near-ties, which bfloat16 breaks by the number of rows: half of all tokens come before
    the first that differs."""
    path = make_random_model("qwen3", tmp_path / "plain", **SIZES)
    recorded, other = runner_of(path, 1, rounds=True), runner_of(path, 0, rounds=True)
    assert recorded.num_graphs > 0
    assert num_held(recorded) == 8
    pairs = zip(outputs_of(recorded), outputs_of(other), strict=True)
    equal = [[a == b for a, b in zip(*pair, strict=True)] for pair in pairs]
    num_before = sum(([*each, False]).index(False) for each in equal)
    assert num_before >= sum(map(len, equal)) / 2


@pytest.mark.parametrize(("form", "holds"), [("block", 0), ("channel", 8), ("tensor", 8)])
def test_forms_of_checkpoints(tmp_path: Path, form: str, holds: int) -> None:
    """Blocks become values; the others are what rounding the same values gives."""
    plain = make_random_model("qwen3", tmp_path / "plain", **SIZES)
    stored, values = write_fp8(plain, tmp_path, form)
    runner = runner_of(stored)
    assert num_held(runner) == holds
    for name, tensor in tensors_of(values).items():
        found = runner.weights.value_of(name)
        assert found is not None
        wanted = tensor if holds and is_rounded(name, tensor) else tensor.bfloat16().float()
        assert torch.equal(found.float().cpu(), wanted), name
    if not holds:
        assert outputs_of(runner) == outputs_of(runner_of(values))


def test_new_weights_are_rounded_as_on_a_host(tmp_path: Path) -> None:
    runner = runner_of(make_random_model("qwen3", tmp_path / "plain", **SIZES), rounds=True)
    other = make_random_model("qwen3", tmp_path / "other", seed=5, **SIZES)
    new = {name: tensor.bfloat16().to(DEVICE) for name, tensor in tensors_of(other).items()}
    _, values = fp8_tensors({name: tensor.float().cpu() for name, tensor in new.items()}, "channel")
    runner.weights.apply(runner.weights.reader.from_tensors(iter(new.items())))
    found = runner.weights.value_of(DOWN)
    assert found is not None
    assert torch.equal(found.cpu(), values[DOWN])
    runner.weights.release()
    runner.weights.restore()
    again = runner.weights.value_of(DOWN)
    assert again is not None
    assert torch.equal(again, found)
