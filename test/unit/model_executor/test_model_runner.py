"""What a model runner does before the first step."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.processes.worker_factory import make_worker
from utils import SchedulerHarness, Setup, make_runner


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_up_leaves_no_trace(page_size: int) -> None:
    """But in the dummy page. Three requests of one row follow, as many as a warm-up has."""
    setup = Setup(num_pages=640 // page_size, page_size=page_size, chunked_prefill_size=3)
    outputs = []
    for warms_up in (False, True):
        runner = make_runner(resolve_model_path("demo"), setup)
        if warms_up:
            before = [kv[page_size:].clone() for kv in runner.kv_pool.kv]
            table = runner.req_to_token_pool.req_to_token.clone()
            runner.warm_up()
            assert runner.req_to_token_pool.req_to_token.equal(table)
            for kv, old in zip(runner.kv_pool.kv, before, strict=True):
                assert kv[page_size:].equal(old)
            assert any(kv[0].any() for kv in runner.kv_pool.kv), "No step was run."
        harness = SchedulerHarness(setup, make_worker(runner, None))
        outputs.append(harness.generate([[5], [6], [7]], max_new_tokens=12, temperature=0.0))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("wanted", [[6], [4, 0], []], ids=str)
def test_rows_that_nobody_reads_leave_only_their_kv(wanted: list[int]) -> None:
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=64))
    slots = torch.arange(1, 8)
    runner.req_to_token_pool.req_to_token[0, :5] = slots[:5]
    runner.req_to_token_pool.req_to_token[1, :2] = slots[5:]
    batch = ForwardBatch(
        input_ids=slots * 3,
        positions=torch.tensor([0, 1, 2, 3, 4, 0, 1]),
        slots=slots,
        rows=torch.tensor([0, 1]),
        q_lens=[5, 2],
        kv_lens=torch.tensor([5, 2]),
        kv_len_upper_bounds=[5, 2],
    )
    hidden = runner.forward(batch).hidden
    stored = [kv.clone() for kv in runner.kv_pool.kv]
    for kv in runner.kv_pool.kv:
        kv.zero_()
    found = runner.forward(replace(batch, read_index=torch.tensor(wanted).long())).hidden
    assert found.shape == (len(wanted), hidden.shape[1])
    torch.testing.assert_close(found, hidden[wanted])
    for kv, before in zip(runner.kv_pool.kv, stored, strict=True):
        torch.testing.assert_close(kv[1:8], before[1:8])
        assert before[1:8].any()


def test_a_prompt_is_read_at_its_end_alone() -> None:
    """Unless somebody wants more of it: hidden states, log-probabilities of its tokens."""
    setup = Setup(num_pages=64)
    runner = make_runner(resolve_model_path("demo"), setup)
    harness = SchedulerHarness(setup, make_worker(runner, None))
    sizes = []
    forward = runner.forward

    def recording(batch: ForwardBatch) -> ForwardResult:
        result = forward(batch)
        sizes.append(len(result.hidden))
        return result

    with mock.patch.object(runner, "forward", recording):
        harness.generate([[5, 6, 7], [8, 9]], max_new_tokens=1, temperature=0.0)
        harness.submit([15, 16, 17], max_new_tokens=1, hidden_states="all")
        harness.run()
    assert sizes == [2, 3]
