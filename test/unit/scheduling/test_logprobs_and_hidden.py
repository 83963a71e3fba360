"""Which hidden states of a step a request gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenReader
from sglang.srt.scheduling.request import LaunchedRow
from sglang.srt.step.worker import HostResult

STATES = torch.arange(4.0)[:, None, None]  # the last one is of the next request


@pytest.mark.parametrize(
    ("num_hidden", "num_kept", "expected"),
    [
        (3, 5, STATES[:3]),
        (3, 4, STATES[:2]),  # the last row of the prompt is fed again, and has its state then
        (1, 4, STATES[:0]),
        (0, 4, STATES[:0]),
    ],
)
def test_a_row_that_is_fed_again_gives_its_state_once(
    num_hidden: int, num_kept: int, expected: torch.Tensor
) -> None:
    """Of a prompt of five tokens the states of the last `num_hidden` are wanted."""
    request: Any = None  # not looked at
    row = LaunchedRow(req=request, max_kept=5, emits=True, ends_prompt=True, num_hidden=num_hidden)
    result = HostResult([[7], [8]], [int(num_kept == 5), 1], [num_kept, 1], hidden_states=STATES)
    reader = LogprobsAndHiddenReader(result)
    assert_equal(reader.take_hidden_states(row, num_kept), expected)
    behind = LaunchedRow(req=request, max_kept=1, emits=False, ends_prompt=False, num_hidden=1)
    assert_equal(reader.take_hidden_states(behind, 1), STATES[num_hidden : num_hidden + 1])


def assert_equal(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    assert torch.equal(found, expected)
