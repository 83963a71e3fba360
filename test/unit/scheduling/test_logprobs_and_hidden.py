"""Log-probabilities and hidden states that a step returns, and those that a request gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenReader
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.scheduling.step_builder import StepBuilder
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import BatchRequest, HostResult

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
    """Checks a prompt of five tokens, of which the states of the last `num_hidden` are wanted."""
    request: Any = None  # not looked at
    prompt = BatchRequest(0, 5, num_prompt_tokens=5)
    row = LaunchedRow(request, prompt, max_kept=5, hidden=range(5 - num_hidden, 5))
    result = HostResult([[7], [8]], [int(num_kept == 5), 1], [num_kept, 1], hidden_states=STATES)
    reader = LogprobsAndHiddenReader(result)
    assert_equal(reader.take_hidden_states(row, num_kept), expected)
    chunk = BatchRequest(1, 1, num_prompt_tokens=1, emits=False)
    behind = LaunchedRow(request, chunk, max_kept=1, hidden=range(1))
    assert_equal(reader.take_hidden_states(behind, 1), STATES[num_hidden : num_hidden + 1])


def assert_equal(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    if found is None:
        assert len(expected) == 0
    else:
        assert torch.equal(found, expected)


def asking(row: int, num_kv: int, num_tokens: int, **asks: Any) -> Req:
    """A request in this row of the page table, with KV of its first tokens; token i is i."""
    width = StepWidth(decode_rows=3, lookahead_rows=2, max_kept=2)
    params = SamplingParams(temperature=0.0)
    req = Req(row, str(row), [*range(num_tokens)], params, width, 0, row, (), frozenset(), **asks)
    req.kv = SimpleNamespace(row=row)  # type: ignore[assignment]
    req.committed_bound = num_kv
    return req


def test_rows_are_named_by_the_places_of_requests_in_the_batch_where_prompts_come_first() -> None:
    logprobs = LogprobOptions(start_len=3, top_num=2)
    step = StepBuilder(price_ms=1.0)
    step.add_decode(asking(7, 9, 9, logprobs=LogprobOptions(start_len=8), hidden_states="last"))
    step.add_prompt(asking(4, 2, 8, logprobs=logprobs, hidden_states="all"), 4, 0, is_last=False)
    planned = step.build(PageTableWrites(), [])
    batch = planned.batch
    assert batch.requests == [BatchRequest(4, 4, 4, False, 2), BatchRequest(7, 3, 0, True, 9)]
    assert batch.hidden_rows == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert batch.logprobs is not None
    assert batch.logprobs.emitting == [1]
    assert batch.logprobs.prompt_rows == [(0, 1), (0, 2), (0, 3)]
    assert batch.logprobs.prompt_targets == [4, 5, 6]
    assert batch.logprobs.prompts.top_num == 2
    assert [row.scored for row in planned.rows] == [range(1, 4), range(0)]
    assert planned.price_ms is None, "what the step returns of prompts has no price"


@pytest.mark.parametrize("has_both", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_fixed_orders_have_a_price_where_there_are_no_others(
    deterministic: bool, has_both: bool
) -> None:
    step, request = StepBuilder(has_both, price_ms=1.0), asking(7, 9, 9)
    request.params.deterministic = deterministic
    step.add_decode(request)
    is_priced = not (has_both and deterministic)
    assert step.build(PageTableWrites(), []).price_ms == (1.0 if is_priced else None)
