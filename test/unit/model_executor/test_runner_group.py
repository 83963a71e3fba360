"""Two models over one KV memory: one page table, and a pool each behind the same slots."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model_harness import Feeder, sequence
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ForwardResult, ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from utils import CONTEXT_LEN, Setup, make_execution, make_random_model

TARGET = {"num_hidden_layers": 2}
DRAFT = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
TARGET_BYTES, DRAFT_BYTES = 2 * 2 * 2 * 16 * 4, 2 * 3 * 1 * 32 * 4  # of a token, in float32
STEPS: list[dict[str, list[int]]] = [
    {"a": sequence(21), "b": sequence(5, 1)},
    {"a": [7], "b": sequence(30, 2)},
    {"a": [9], "b": [4], "c": sequence(17, 3)},
    {"c": [5], "a": [6]},
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = make_random_model("llama", folder / "target", 0, **TARGET)
    return target, make_random_model("qwen3", folder / "draft", 1, **DRAFT)


def configs(paths: tuple[Path, Path], page_size: int = 1, **changes: Any) -> list[ExecutionConfig]:
    setup = Setup(num_pages=320 // page_size, page_size=page_size)
    return [make_execution(path, setup, **changes) for path in paths]


def run(group: RunnerGroup) -> list[list[torch.Tensor]]:
    """Hidden states of all rows of each step, of each runner: all of them run each step, over the
    slots that the ledger gave."""
    found: list[list[torch.Tensor]] = [[] for _ in group.runners]
    forward = group.target.forward

    def both(batch: ForwardBatch) -> ForwardResult:
        for runner, hidden in zip(group.runners[1:], found[1:], strict=True):
            hidden.append(runner.forward(replace(batch, read_index=None)).hidden.clone())
        found[0].append(forward(replace(batch, read_index=None)).hidden.clone())
        return forward(batch)

    feeder = Feeder(group.target, group.memory.page_size)
    with mock.patch.object(group.target, "forward", both):
        for chunks in STEPS:
            feeder.feed(chunks)
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(STEPS)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("page_size", [1, 16])
def test_each_model_computes_what_it_computes_alone(
    paths: tuple[Path, Path], page_size: int
) -> None:
    both = configs(paths, page_size)
    alone = [run(make_runners(config))[0] for config in both]
    group = make_runners(*both)
    target, draft = group.runners
    assert target.req_to_token_pool is draft.req_to_token_pool is group.memory.table
    assert [len(pool.kv) for pool in group.memory.pools] == [2, 3]
    assert [pool.kv[0].shape[2] for pool in group.memory.pools] == [16, 32]
    for found, expected in zip(run(group), alone, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("page_size", [1, 16])
def test_all_pools_are_released_and_restored_together(
    paths: tuple[Path, Path], page_size: int
) -> None:
    group = make_runners(*configs(paths, page_size))
    expected = run(group)
    tensors = [kv for pool in group.memory.pools for kv in pool.kv]
    group.memory.release()
    assert group.memory.is_released
    assert {kv.untyped_storage().nbytes() for kv in tensors} == {0}
    for runner in group.runners:
        with pytest.raises(AssertionError, match="KV"):
            Feeder(runner, page_size).feed({"a": [1]})
    with pytest.raises(RuntimeError, match="already"):
        group.memory.release()
    group.restore_kv()
    assert not group.memory.is_released
    assert not any(kv.any() for kv in tensors)
    for found, before in zip(run(group), expected, strict=True):
        assert_same(found, before)
    with pytest.raises(RuntimeError, match="not released"):
        group.memory.restore()
    assert not group.memory.is_released


def test_restored_memory_is_where_its_addresses_say(paths: tuple[Path, Path]) -> None:
    memory = make_runners(*configs(paths)).memory
    pool = memory.pools[1]
    pool.track_starts(4)
    notes, marks = pool.add_notes(1), pool.is_fed
    assert marks is not None
    marks.fill_(True)
    addresses = memory.addresses()
    memory.release()
    addresses.table.zero_()  # memory that was taken again may be anywhere
    memory.restore()
    tensors = [*memory.pools[0].kv, *pool.kv, marks, notes]
    assert addresses.table[:, 0].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert not marks.any()


def test_pools_of_which_one_finds_no_memory_all_stay_released(paths: tuple[Path, Path]) -> None:
    group = make_runners(*configs(paths))
    group.memory.release()
    error = RuntimeError("no memory")
    with (
        mock.patch.object(group.memory.pools[1], "restore", side_effect=error),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        group.restore_kv()
    assert all(pool.is_released for pool in group.memory.pools)
    group.restore_kv()
    assert not group.memory.is_released


def test_pools_stay_released_where_the_second_model_has_no_room_for_steps(
    paths: tuple[Path, Path],
) -> None:
    group = make_runners(*configs(paths))
    group.memory.release()
    error = MemoryError("too little for it")
    with (
        mock.patch.object(group.runners[1], "capture_graphs", side_effect=error),
        pytest.raises(RuntimeError, match="too little for it"),
    ):
        group.restore_kv()
    assert all(pool.is_released for pool in group.memory.pools)


def test_the_weights_of_all_models_are_released_together(paths: tuple[Path, Path]) -> None:
    group = make_runners(*configs(paths))
    expected = run(group)
    group.release_weights()
    assert all(runner.weights.is_released for runner in group.runners)
    group.restore_weights()
    for found, before in zip(run(group), expected, strict=True):
        assert_same(found, before)
    error = WeightUpdateError("shared")
    second = group.runners[1].weights
    with (
        mock.patch.object(second, "release", side_effect=error),
        pytest.raises(WeightUpdateError, match="shared"),
    ):
        group.release_weights()
    assert not any(runner.weights.is_released for runner in group.runners)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pools_share_the_memory_by_what_a_token_takes_in_all_of_them(
    paths: tuple[Path, Path], page_size: int
) -> None:
    budget = 123_456
    both = configs(paths, page_size, kv_budget_bytes=budget, max_total_tokens=None)
    memory = make_runners(*both).memory
    assert memory.bytes_per_token == TARGET_BYTES + DRAFT_BYTES
    page_bytes = page_size * memory.bytes_per_token
    assert memory.num_pages == budget // page_bytes
    assert make_runners(both[0]).memory.num_pages == budget // (page_size * TARGET_BYTES)
    held = sum(kv.nbytes for pool in memory.pools for kv in pool.kv)
    assert held == (memory.num_pages + 1) * page_bytes  # and the dummy page


def test_pools_of_different_sizes_share_no_table() -> None:
    pools = [MHATokenToKVPool(slots, 1, 1, 1, 8, torch.float32, "cpu") for slots in (8, 9)]
    with pytest.raises(ValueError, match="the same slots"):
        KVMemory(ReqToTokenPool(2, 8, "cpu"), pools)


def test_all_graphs_are_captured_before_the_first_large_step() -> None:
    """The memory of graphs is fixed, and a step's is what is left."""
    calls = mock.Mock()
    runners = []
    for name in ("target", "draft"):
        runner = mock.create_autospec(ModelRunner, instance=True)
        runner.memory, runner.device = calls.memory, torch.device("cuda")
        runner.max_prompt_rows = 512
        calls.attach_mock(runner.capture_graphs, f"{name}_graphs")
        calls.attach_mock(runner.warm_up, f"{name}_steps")
        runners.append(runner)
    group = RunnerGroup(runners)
    group.prepare()
    draft = runners[1]
    steps = mock.call.target_steps(drafting=(draft,))
    assert calls.mock_calls == [mock.call.target_graphs(), mock.call.draft_graphs(), steps]
    assert group.max_prompt_rows == 512


def test_the_largest_step_of_all_models_is_run_while_what_the_target_computed_is_held(
    paths: tuple[Path, Path],
) -> None:
    """So it is when a drafter proposes: its model runs while the target's hidden states and logits
    are still there. What does not fit in one of them makes the steps of all smaller."""
    group = make_runners(*configs(paths, max_prompt_rows=2048, max_running_requests=3))
    target, draft = group.runners
    held: list[weakref.ref[torch.Tensor]] = []
    run_target, run_draft, rows = target._run_dummy, draft._run_dummy, list[int]()

    def of_target(q_lens: list[int], is_packed: bool = False) -> tuple[ModelOutput, torch.Tensor]:
        assert not any(each() is not None for each in held), "A step that failed holds memory."
        output, logits = run_target(q_lens, is_packed)
        held[:] = [weakref.ref(output.hidden), weakref.ref(logits)]
        return output, logits

    def of_draft(q_lens: list[int], is_packed: bool = False) -> tuple[ModelOutput, torch.Tensor]:
        assert sum(q_lens) <= 200 or all(each() is not None for each in held)
        rows.append(sum(q_lens))
        if rows[-1] > 600:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run_draft(q_lens, is_packed)

    with (
        mock.patch.object(target, "_run_dummy", of_target),
        mock.patch.object(draft, "_run_dummy", of_draft),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(5 << 20, 100 << 20)),
    ):
        target.warm_up(drafting=group.runners[1:])
    assert rows[1:] == [3 * (CONTEXT_LEN + 3), 1024 + 1, 512 + 2]
    assert group.max_prompt_rows == 512
