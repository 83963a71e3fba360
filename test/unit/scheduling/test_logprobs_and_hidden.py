"""Which hidden states of a step a request gets."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenReader
from sglang.srt.scheduling.request import LaunchedRow
from sglang.srt.step.worker import BatchRequest, HostResult

STATES = [b"0", b"1", b"2", b"next request"]


@pytest.mark.parametrize(
    ("num_hidden", "num_kept", "expected"),
    [
        (3, 5, STATES[:3]),
        (3, 4, STATES[:2]),  # the last row of the prompt is fed again, and has its state then
        (1, 4, []),
        (0, 4, []),
    ],
)
def test_a_row_that_is_fed_again_gives_its_state_once(
    num_hidden: int, num_kept: int, expected: list[bytes]
) -> None:
    """Of a prompt of five tokens the states of the last `num_hidden` are wanted."""
    request: Any = None  # not looked at
    prompt = BatchRequest(0, 5, num_prompt_tokens=5)
    row = LaunchedRow(request, prompt, max_kept=5, hidden=range(5 - num_hidden, 5))
    result = HostResult([[7], [8]], [int(num_kept == 5), 1], [num_kept, 1], hidden_states=STATES)
    reader = LogprobsAndHiddenReader(result)
    assert reader.take_hidden_states(row, num_kept) == expected
    chunk = BatchRequest(1, 1, num_prompt_tokens=1, emits=False)
    behind = LaunchedRow(request, chunk, max_kept=1, hidden=range(1))
    assert reader.take_hidden_states(behind, 1) == [STATES[num_hidden]]
