"""Triton's step operations against torch's, in Triton's interpreter; inputs of a graph."""

from __future__ import annotations

import pytest
import torch

from interpreted import run_interpreted
from sglang.srt.layers.forward_batch import UNIFORM, ForwardBatch, GraphKey
from sglang.srt.step.step_ops import StaticInputs
from sglang.srt.step.torch_step_ops import TorchStepOps
from step_ops_cases import CASES, OUTSIDE_CASES


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/step_ops_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", [*CASES, *OUTSIDE_CASES])
def test_interpreted_triton(differences: dict[str, float | str], name: str) -> None:
    assert differences[name] == ""


def test_a_ragged_step_is_spread_over_a_uniform_graph() -> None:
    ids = torch.tensor([11, 12, 13])
    static = StaticInputs(torch.full((3, 8), -1), torch.full((3, 4), -1), torch.full((5,), -1))
    lens = torch.tensor([5, 9])
    batch = ForwardBatch(ids, ids + 10, ids + 20, torch.tensor([3, 2]), [1, 2], lens, [5, 9])
    index = TorchStepOps(torch.device("cpu")).fill(static, GraphKey(UNIFORM, 3, 2, 6), batch)
    assert index is not None
    assert index.tolist() == [0, 2, 3]
    assert static.tokens[0].tolist() == [11, 0, 12, 13, 0, 0, -1, -1]
    assert static.tokens[2].tolist() == [31, 0, 32, 33, 0, 0, -1, -1]
    assert static.requests.tolist() == [[3, 2, 0, -1], [6, 9, 2, -1], [0, 0, 0, -1]]
