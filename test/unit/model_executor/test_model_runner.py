"""Tests what a model runner does before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fake_flashinfer import install_fake
from sglang.srt.layers.attention.flashinfer_backend import FlashInferBackend
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.model_runner import ForwardResult, ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.weight_sync.weight_store import WeightStore
from utils import CONTEXT_LEN, SchedulerHarness, Setup, make_runner


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
        harness = SchedulerHarness(setup, make_worker(RunnerGroup([runner]), None))
        outputs.append(harness.generate([[5], [6], [7]], max_new_tokens=12, temperature=0.0))
    assert outputs[0] == outputs[1]


def test_steps_of_nobody_stand_on_the_row_that_is_nobodys() -> None:
    """Requests may be there when memory is resumed, and of their rows a head may have KV from some
    token on alone (`MHATokenToKVPool.kv_starts`)."""
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=640))
    planned, plan = list[ForwardBatch](), LayerRuntime.plan

    def noted(layers: LayerRuntime, batch: ForwardBatch) -> None:
        planned.append(batch)
        plan(layers, batch)

    with mock.patch.object(LayerRuntime, "plan", noted):
        runner.warm_up()
    assert planned
    padding_row = runner.req_to_token_pool.padding_row
    assert all((batch.rows == padding_row).all() for batch in planned)


@pytest.mark.parametrize("has_trees", [False, True])
def test_masks_of_trees_are_met_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, has_trees: bool
) -> None:
    """FlashInfer compiles what packs them when it gets the first one."""
    wrappers = install_fake(monkeypatch)
    known = FlashInferBackend.capabilities()
    here = replace(known, devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))
    monkeypatch.setattr(FlashInferBackend, "capabilities", classmethod(lambda cls: here))
    more = {"attention_backend": "flashinfer", "captures_trees": has_trees}
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=640), **more)
    runner.warm_up()
    assert wrappers
    assert any(wrapper.num_masked for wrapper in wrappers) == has_trees


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
    harness = SchedulerHarness(setup, make_worker(RunnerGroup([runner]), None))
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


@contextmanager
def a_small_gpu(runner: ModelRunner, wished: int, room: int) -> Iterator[list[int]]:
    """Steps of more than `room` rows find too little memory; gives the rows of those that are
    run."""
    model, sizes = runner.model, []

    def run(batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture) -> ModelOutput:
        sizes.append(sum(batch.q_lens))
        if sizes[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        output: ModelOutput = model(batch, runtime, capture)
        return output

    runner.max_prompt_rows = wished
    fake = mock.Mock(side_effect=run, compute_logits=model.compute_logits, hidden_width=0)
    with (
        mock.patch.object(runner, "model", fake),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(5 << 20, 100 << 20)),
    ):
        yield sizes


def test_a_step_that_does_not_fit_makes_chunks_smaller(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=64, max_running_requests=3))
    with a_small_gpu(runner, 2048, room=600) as sizes:
        runner.warm_up()
    assert sizes[1:] == [3 * (CONTEXT_LEN + 3), 1024 + 1, 512 + 2]
    assert runner.max_prompt_rows == 512
    [record] = caplog.records
    assert "up to 512 prompt tokens, not 2048 (--chunked-prefill-size)" in record.message
    caplog.clear()
    with a_small_gpu(runner, 512, room=600) as sizes:
        runner.warm_up()
    assert (sizes[1:], runner.max_prompt_rows, caplog.records) == ([512 + 2], 512, [])


def test_too_little_memory_for_a_small_step_is_an_error() -> None:
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=64))
    with (
        a_small_gpu(runner, 1024, room=250),
        pytest.raises(MemoryError, match=r"a step of 256 prompt tokens: 5 of 100 MiB .*--mem-fr"),
    ):
        runner.warm_up()


@pytest.mark.parametrize("part", ["kv", "weights"])
def test_memory_that_leaves_no_room_for_steps_stays_released(part: str) -> None:
    """And can be taken again later."""
    runner = make_runner(resolve_model_path("demo"), Setup(num_pages=64))
    group = RunnerGroup([runner])
    owner: KVMemory | WeightStore = runner.weights
    release, restore = group.release_weights, group.restore_weights
    if part == "kv":
        owner, release, restore = group.memory, group.memory.release, group.restore_kv
    release()
    with (
        mock.patch.object(runner, "capture_graphs", side_effect=MemoryError("too little for it")),
        pytest.raises(RuntimeError, match="too little for it"),
    ):
        restore()
    assert owner.is_released
    restore()
    assert not owner.is_released
